"""The factors of an adapter, gathered from the ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..layer.holding import is_partitioned

# what wrappers put into parameters' names: checkpointing's, torch.compile's
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
FSDP1 = "_fsdp_wrapped_module."
AT_ONCE = 64  # parameters that ZeRO-3 gathers together


def gathered_factors(model: nn.Module, adapter: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Copy the factors of an adapter to the host, whole, by PEFT's names of its state dict. All ranks call it.

    FSDP2 and expert parallelism share factors as DTensors, ZeRO-3 leaves empty tensors in their place.

    Args:
        model: a PeftModel. device: where DTensors that are offloaded to the host are gathered.
    Raises:
        RuntimeError: FSDP's first version holds them.
    """
    factors = {}
    for name, parameter in _gathered(model, adapter):
        if FSDP1 in name:
            raise RuntimeError(
                "FSDP version 1 flattens adapters beyond recognition; use fsdp_version: 2 in accelerate's config"
            )
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        whole: Any = parameter.detach()
        if hasattr(whole, "full_tensor"):
            whole = (whole.to(device) if whole.is_cpu else whole).full_tensor()
        factors[name] = whole.to("cpu", copy=True)
    return factors


def _gathered(model: nn.Module, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the adapter's parameters by name, while they are whole where ZeRO-3 partitions them."""
    own = [(name, each) for name, each in model.named_parameters() if "lora_" in name and f".{adapter}." in f"{name}."]
    for start in range(0, len(own), AT_ONCE):
        some = own[start : start + AT_ONCE]
        partitioned = [parameter for _, parameter in some if is_partitioned(parameter)]
        context: Any = nullcontext()
        if partitioned:
            import deepspeed

            context = deepspeed.zero.GatheredParameters(partitioned)
        with context:
            yield from some
