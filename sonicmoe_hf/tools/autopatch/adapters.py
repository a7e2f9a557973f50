"""--adapt-experts: the experts' weights added to a LoRA config of somebody else's."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...lora.config import check_parameter_options, experts_patterns, experts_targets

REMEDY = "have the program set it to 0 or leave it out, or leave out --adapt-experts"


def add_experts(config: Any, model: nn.Module, rank: int) -> None:
    """Make a `peft.LoraConfig` adapt the experts' weights of `model` too, at this rank and at the config's own scale.

    Raises:
        ValueError: it is a config of another kind, it adapts experts already, or it asks what PEFT cannot do with
            parameters, such as DoRA.
    """
    if type(config).__name__ != "LoraConfig":
        raise ValueError(
            f"--adapt-experts adds experts to a LoraConfig, not to a {type(config).__name__}; leave it out"
        )
    targets = experts_targets(model, config.layers_to_transform)
    present = [name for name in config.target_parameters or [] if any(_ends_alike(name, target) for target in targets)]
    if present:
        raise ValueError(
            f"--adapt-experts {rank}: the program's LoRA adapts experts already (target_parameters has {present[0]}); "
            "leave out --adapt-experts"
        )
    check_parameter_options(vars(config), REMEDY)
    config.target_parameters = [*(config.target_parameters or []), *targets]
    if rank == config.r:
        return
    settings = experts_patterns(vars(config), targets, rank)
    config.rank_pattern, config.alpha_pattern = settings["rank_pattern"], settings["alpha_pattern"]


def _ends_alike(name: str, other: str) -> bool:
    return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")
