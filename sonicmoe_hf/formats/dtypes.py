"""The dtypes that a model is loaded in, where an early version of Transformers leaves some as the checkpoint has them.

There a tensor of a quantized checkpoint that has another name in the model keeps its dtype: of nemotron_h, whose names
begin with "backbone", all that our converters of weights do not see.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..layer.packed_weight import PackedWeight
from ..private.transformers import strictly_fp32_modules
from .hub_conversions import CASTS_FP8


def _floats(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for held in (model.named_parameters(), model.named_buffers()):
        for name, tensor in held:
            if tensor.is_floating_point() and not isinstance(tensor, PackedWeight):
                yield name, tensor


def wanted_dtypes(model) -> dict[str, torch.dtype]:
    """By name, those of a model's parameters and buffers before it is loaded; {} where Transformers sees to them."""
    if not CASTS_FP8:  # the same versions
        return {}
    kept = strictly_fp32_modules(model)
    return {
        name: torch.float32 if any(part in kept for part in name.split(".")) else tensor.dtype
        for name, tensor in _floats(model)
    }


def restore_dtypes(model: nn.Module, wanted: dict[str, torch.dtype]) -> None:
    """Cast what was read in another dtype than `wanted_dtypes` said."""
    for name, tensor in _floats(model):
        dtype = wanted.get(name, tensor.dtype)
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
