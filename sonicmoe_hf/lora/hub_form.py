"""Adapters in PEFT's own form for fused experts (target_parameters), in the hub's order: read as factors, and written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from ..checkpoints.files import ADAPTER_CONFIG
from ..errors import CheckpointError
from .base_model import BaseModel
from .factors import EXPERT_WEIGHTS, AdapterFactors, Factors, as_alpha, endings, from_peft, scale_of, to_peft
from .per_expert import factors_of_module
from .rules import KEY, PREFIX, resolved


def read_hub_form(
    weights: dict[str, torch.Tensor],
    config: dict,
    tensors_of: dict[str, dict[str, tuple[str, str]]],
    model: BaseModel,
    path: Path,
) -> AdapterFactors:
    """The factors of an adapter.

    Args:
        tensors_of: by experts module and weight, the names of its lora_A and lora_B, whose shapes were checked.
    Raises:
        CheckpointError: the adapter is on experts' biases, or has a tensor that is no factor of a linear layer.
    """
    experts: dict[str, dict[str, Factors]] = {}
    taken = set()
    for module, named in tensors_of.items():
        for weight, (name_a, name_b) in named.items():
            if weight not in EXPERT_WEIGHTS:
                raise CheckpointError(
                    f"{path}: the adapter is on {module}.{weight}, and no form but PEFT's own has factors of biases: "
                    "merge it: sonicmoe-hf merge BASE ADAPTER DST"
                )
            num_experts = model.blocks[module.removesuffix(".experts")].num_experts
            scale = _scale(config, f"{module}.{weight}", path)
            experts.setdefault(module, {})[weight] = Factors(
                *from_peft(weights[name_a], weights[name_b], num_experts), scale
            )
            taken |= {name_a, name_b}
    pairs: dict[str, dict[str, str]] = {}
    for name in weights.keys() - taken:
        match = KEY.match(name.removeprefix(PREFIX))
        if match is None or match["depth"]:
            raise CheckpointError(f"{path}: {name} is no factor of a linear layer")
        pairs.setdefault(match["module"], {})[match["side"]] = name
    linear = {module: factors_of_module(weights, config, module, pairs[module], path) for module in sorted(pairs)}
    return AdapterFactors(linear, experts)


def _scale(config: dict, name: str, path: Path) -> float:
    config_path = path.with_name(ADAPTER_CONFIG)
    rank, alpha = (resolved(config, pattern, name, config_path) for pattern in ("rank_pattern", "alpha_pattern"))
    return scale_of(rank, alpha, config)


def write_hub_form(factors: AdapterFactors, config: dict, model: BaseModel) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors and adapter_config.json: each weight with its own rank, and its scale by its own alpha. Weights of
    experts whose factors are all zeros are left out."""
    factors = factors.fused(model.is_interleaved).without_zeros()
    named = {**factors.linear}
    named.update({f"{module}.{name}": f for module, both in factors.experts.items() for name, f in both.items()})
    settings = {name: (f.rank, as_alpha(f.scale * f.rank)) for name, f in named.items()}
    rank, alpha = Counter(settings.values()).most_common(1)[0][0]
    new_config = {
        **config,
        **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern")),
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "rank_pattern": {name: own for name, (own, _) in settings.items() if own != rank},
        "alpha_pattern": {name: own for name, (_, own) in settings.items() if own != alpha},
        "target_modules": linear_targets(factors, model),
        "target_parameters": target_parameters(factors, model),
    }
    return write_tensors(factors), new_config


def write_tensors(factors: AdapterFactors) -> dict[str, torch.Tensor]:
    """By name; the first adapted weight's wrapper is the innermost."""
    weights = {}
    for module, (a, b, _) in factors.linear.items():
        weights[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
        weights[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
    for module, both in factors.experts.items():
        names = [name for name in EXPERT_WEIGHTS if name in both]
        for depth, name in enumerate(reversed(names)):
            wrapper = f"{PREFIX}{module}.{'base_layer.' * depth}"
            weights[f"{wrapper}lora_A.weight"], weights[f"{wrapper}lora_B.weight"] = to_peft(both[name])
    return weights


def target_parameters(factors: AdapterFactors, model: BaseModel) -> list[str]:
    """What PEFT is told of the experts' weights, by endings that no other weight of the model has."""
    names = [f"{module}.{weight}" for module, weights in factors.experts.items() for weight in weights]
    every = [f"{block}.experts.{weight}" for block in model.blocks for weight in EXPERT_WEIGHTS]
    return endings(names, [*every, *model.plain], parts=(3,))


def linear_targets(factors: AdapterFactors, model: BaseModel) -> list[str]:
    """What PEFT is told of the linear layers, by endings that no other module has."""
    return endings(factors.linear, {name.rpartition(".")[0] for name in model.plain}, parts=(1, 2))
