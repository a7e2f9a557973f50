"""The dither of a model's weights: the same for one weight in every layout, file and memory."""

from __future__ import annotations

from torch import nn

from ..kernels.packed.dither import Dither
from ..layer.experts_module import is_experts, row_order, weight_names

MERGE_ROUNDINGS = ("dithered", "nearest")  # of a packed weight that an adapter changes
OF_EXPERTS = ("gate_up_proj", "down_proj")  # whatever the layout calls the weights of the first and the second product


def dither_of(name: str, module: nn.Module, seed: int) -> Dither:
    """Make the dither of a weight as the module holds it. name: of the weight in the Transformers model."""
    prefix, _, own = name.rpartition(".")
    if not is_experts(module) or own not in (names := weight_names(module)):
        return Dither(name, seed)
    return Dither(f"{prefix}.{OF_EXPERTS[names.index(own)]}", seed, row_order(module, own))
