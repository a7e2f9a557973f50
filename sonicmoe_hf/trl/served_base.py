"""A check that the base which vLLM serves has the experts that the trainer computes with: weights never travel, so that
each reads its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.reading.config_only import build_from_config
from ..checkpoints.reading.converters import WeightGroup, weight_groups
from ..checkpoints.reading.files import CONFIG_FILE, local_folder
from ..checkpoints.reading.stored import StoredWeights
from ..checkpoints.reading.weight import read_parameters
from ..errors import CheckpointError
from ..layer.experts_module import is_experts, is_native, weight_names
from ..layer.holding import local_tensor
from ..layer.packed_weight import PackedWeight
from ..streaming.weight import HostWeight

logger = logging.getLogger(__name__)
LAYERS = 3  # that are compared: the first, one between and the last
TOLERANCE = 2**-8  # relative, of root mean squares: bf16 rounds by 2**-9 at most, FP8 by 0.026 and NF4 by 0.09
ROUNDED = "sonicmoe-hf convert {base} DST --layout hub --round {format}"
DIFFERS = (
    "the experts of {served}, which vLLM serves, are {distance} those that the trainer computes with "
    "({layer}{held}){consequence}"
)


def check_served_base(model: nn.Module, served: str, is_given: bool) -> None:
    """Compare the first expert of some layers with that of the checkpoint that vLLM serves.

    Args:
        model: the trainer's. served: folder or hub id. is_given: whether the user named it as served_base.
    Raises:
        ValueError: they differ by more than bf16's rounding, and it was named. Otherwise a warning says so.
    """
    trained = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    if not trained:
        return
    try:
        stored = StoredWeights(local_folder(served))
        served_model = build_from_config(stored.config, stored.folder / CONFIG_FILE)
        groups = weight_groups(served_model, stored.shapes)
    except (CheckpointError, OSError) as error:
        logger.warning(f"sonicmoe_hf: the base that vLLM serves was not compared with the trainer's: {error}")
        return
    layers = [(name, module) for name, module in served_model.named_modules() if is_experts(module)]
    if len(layers) != len(trained):
        raise ValueError(f"{served} has {len(layers)} layers with experts, and the trainer's model {len(trained)}")
    for number in sorted({0, len(layers) // 2, len(layers) - 1})[:LAYERS]:
        (name, ours), (their_name, theirs) = trained[number], layers[number]
        for own, there in zip(weight_names(ours), weight_names(theirs)):
            here = _first_expert(getattr(ours, own))
            if here is None:
                return
            read = _read_first_expert(stored, groups[f"{their_name}.{there}"], f"{their_name}.{there}")
            if (difference := _difference(here, read, is_native(ours) != is_native(theirs))) > TOLERANCE:
                _say(served, f"{name}.{own}", difference, getattr(ours, own), is_given)
                return


def _first_expert(weight: Any) -> torch.Tensor | None:
    """Read the first expert's weight [out, in] or [in, out] in fp32, on the host; None where it is not here yet."""
    weight = local_tensor(weight)
    if weight.is_meta or isinstance(weight, HostWeight) or not weight.numel():
        return None
    if isinstance(weight, PackedWeight):
        return weight.dequantize()[0].float().cpu()
    return weight.detach()[0].float().cpu()


def _read_first_expert(stored: StoredWeights, group: WeightGroup, target: str) -> torch.Tensor:
    expert = 0 if group.num_experts else None
    return read_parameters(stored.weights, group, expert, torch.float32)[target][0]


def _difference(here: torch.Tensor, there: torch.Tensor, is_reordered: bool) -> float:
    """Compute the relative difference of root mean squares, inf where shapes differ; of sorted values where two layouts
    have other orders."""
    if is_reordered:
        here, there = here.flatten().sort().values, there.flatten().sort().values
    if here.shape != there.shape:
        return float("inf")
    return float((here - there).norm() / there.norm().clamp(min=1e-30))


def _say(served: str, layer: str, difference: float, weight: Any, is_given: bool) -> None:
    format = getattr(weight, "format", "")
    held = f", in {format}" if format else ""
    if is_given:
        sentence = "; served_base is another model, or was rounded otherwise"
    else:
        base = Path(served).name if Path(served).is_dir() else served
        remedy = ROUNDED.format(base=base, format=format) if format else "the trained folder"
        sentence = f": serve what is trained, {remedy}, and name it by vllm_adapters(..., served_base=)"
    distance = "of other shapes than" if difference == float("inf") else f"{difference:.1%} away from"
    message = DIFFERS.format(served=served, distance=distance, layer=layer, held=held, consequence=sentence)
    if is_given:
        raise ValueError(message)
    logger.warning(f"sonicmoe_hf: {message}")
