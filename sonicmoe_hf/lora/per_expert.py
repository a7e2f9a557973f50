"""Adapters with a pair of factors for each expert and projection: read, and written.

The form in which vLLM and SGLang take LoRA on experts, and in which PEFT writes it for models whose experts are linear
layers, as they were before Transformers 5: `experts.17.gate_proj.lora_A.weight` [r, in] and `lora_B` [out, r].
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ..checkpoints.files import ADAPTER_CONFIG
from ..errors import CheckpointError
from ..layer.experts_module import Sizes
from .base_model import BaseModel
from .engines import ServedModel
from .factors import PARTS, AdapterFactors, Factors, scale_of, stacked
from .rules import KEY, PREFIX, both_factors, resolved

EXPERT = re.compile(r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<projection>\w+)$")
PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def is_per_expert(names) -> bool:
    """Whether an adapter with tensors of these names has factors for single experts."""
    return any((match := KEY.match(name)) is not None and EXPERT.match(match["module"]) for name in names)


def read_per_expert(weights: dict[str, torch.Tensor], config: dict, model: BaseModel, path: Path) -> AdapterFactors:
    """The factors of such a file, gate's and up's apart; an expert that it lacks has a product of zero.

    Raises:
        CheckpointError: a tensor is unknown or no factor, its partner is missing, or its shape is not that of its rank.
    """
    pairs: dict[str, dict[str, str]] = {}
    for name in weights:
        match = KEY.match(name.removeprefix(PREFIX))
        if match is None or match["depth"]:
            raise CheckpointError(
                f"{path}: {name} is no factor of a linear layer or of a single expert, though others are of single "
                "experts: the file mixes two forms, of which PEFT writes one"
            )
        pairs.setdefault(match["module"], {})[match["side"]] = name
    linear: dict[str, Factors] = {}
    experts: dict[tuple[str, int, str], Factors] = {}
    blocks = _blocks_by_hub_name(model)
    for module, sides in pairs.items():
        factors = factors_of_module(weights, config, module, sides, path)
        match = EXPERT.match(module)
        if match is None:
            linear[module] = factors
            continue
        key = _expert(match, blocks, module, path)
        _check(factors, model.blocks[key[0]], key[2], module, path)
        experts[key] = factors
    return AdapterFactors(linear, _by_module(experts, model))


def factors_of_module(
    weights: dict[str, torch.Tensor], config: dict, module: str, sides: dict[str, str], path: Path
) -> Factors:
    """A linear layer's factors, with their scale by adapter_config.json.

    Raises:
        CheckpointError: one is missing, or they are not of one rank, that of the config.
    """
    a, b = (weights[name] for name in both_factors(f"{module}.weight", sides, path))
    config_path = path.with_name(ADAPTER_CONFIG)
    rank, alpha = (resolved(config, pattern, module, config_path) for pattern in ("rank_pattern", "alpha_pattern"))
    if a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] == rank:
        raise CheckpointError(
            f"{path}: lora_A and lora_B of {module} have shapes {tuple(a.shape)} and {tuple(b.shape)}, where ({rank}, "
            f"in) and (out, {rank}) are due for r = {rank}"
        )
    return Factors(a, b, scale_of(rank, alpha, config))


def _blocks_by_hub_name(model: BaseModel) -> dict[str, str]:
    """The blocks' names in Transformers, by those and by the hub's."""
    served = model.served or ServedModel()
    return {name: block for block in model.blocks for name in (block, hub_block(block, served))}


def hub_block(block: str, served: ServedModel) -> str:
    """What the hub calls a block."""
    parent, dot, _ = block.rpartition(".")
    return f"{parent}{dot}{served.block}"


def _expert(match: re.Match, blocks: dict[str, str], module: str, path: Path) -> tuple[str, int, str]:
    """(block, expert, part) of a single expert's linear layer."""
    block, part = blocks.get(match["block"]), PROJECTIONS.get(match["projection"])
    if block is None or part is None:
        raise CheckpointError(
            f"{path}: {module} is no expert's projection of the model that the adapter was trained on"
        )
    return block, int(match["expert"]), part


def _check(factors: Factors, sizes: Sizes, part: str, module: str, path: Path) -> None:
    number = int(module.rpartition(".")[0].rpartition(".")[2])
    if number >= sizes.num_experts:
        raise CheckpointError(f"{path}: {module} is of expert {number}, but there are {sizes.num_experts}")
    size_in, size_out = (sizes.intermediate, sizes.hidden) if part == "down" else (sizes.hidden, sizes.intermediate)
    if (factors.a.shape[1], factors.b.shape[0]) != (size_in, size_out):
        raise CheckpointError(
            f"{path}: lora_A and lora_B of {module} have shapes {tuple(factors.a.shape)} and {tuple(factors.b.shape)}, "
            f"where (r, {size_in}) and ({size_out}, r) are due"
        )


def _by_module(experts: dict[tuple[str, int, str], Factors], model: BaseModel) -> dict[str, dict[str, Factors]]:
    """Factors by experts module and part."""
    modules: dict[str, dict[str, Factors]] = {}
    for block, sizes in model.blocks.items():
        for part in PARTS:
            own = [experts.get((block, expert, part)) for expert in range(sizes.num_experts)]
            there = next((factors for factors in own if factors is not None), None)
            if there is not None:
                of_all = stacked([factors or there.unchanging() for factors in own])
                modules.setdefault(f"{block}.experts", {})[part] = of_all
    return modules


def write_per_expert(factors: AdapterFactors, served: ServedModel) -> dict[str, torch.Tensor]:
    """The file's tensors, of split factors, as the hub names each expert's projections."""
    weights: dict[str, torch.Tensor] = {}
    for module, (a, b, _) in factors.linear.items():
        weights.update(_named(module, a, b))
    for experts, parts in factors.experts.items():
        block = hub_block(experts.removesuffix(".experts"), served)
        for part, (a, b, _) in parts.items():
            name = getattr(served, part)
            for expert in range(a.shape[0]):
                weights.update(_named(f"{block}.experts.{expert}.{name}", a[expert], b[expert]))
    return weights


def _named(module: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies: a file holds no two tensors of one memory."""
    return {
        f"{PREFIX}{module}.lora_{side}.weight": tensor.clone(memory_format=torch.contiguous_format)
        for side, tensor in (("A", a), ("B", b))
    }
