"""Warnings of bitsandbytes beside experts: it quantizes linear layers alone, and on some CPUs these lose gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..layer.packed_weight import PackedWeight
from .moe_layers import every_experts

logger = logging.getLogger(__name__)
UNPACKED_EXPERTS = (
    "bitsandbytes has quantized the linear layers of {model}, but its experts, {share:.0%} of its bytes, stay in "
    '{dtype}: pack them, by sonicmoe_hf.from_pretrained(..., experts_quantization="nf4") or sonicmoe-hf run '
    "--experts-quantization nf4"
)
ON_CPUS = (
    "the linear layers of {model} are bitsandbytes' on a CPU with AVX512-BF16, where they pass no gradients on once the "
    "model has been evaluated: leave quantization_config out to train there"
)
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_warned_on_cpus: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def dense_beside_bitsandbytes(model: nn.Module) -> torch.dtype | None:
    """Name the dtype of the experts that bitsandbytes has left as they were; None where it has quantized no model, or
    the experts are packed."""
    if getattr(model, "quantization_method", None) != "bitsandbytes":
        return None
    weights = (weight for experts in every_experts(model) for weight in experts.parameters())
    return next((weight.dtype for weight in weights if not isinstance(weight, PackedWeight)), None)


def warn_of_dense_experts(model: nn.Module) -> None:
    """Warn, once for a model, of experts that bitsandbytes has left as they were."""
    dtype = dense_beside_bitsandbytes(model)
    if dtype is None or model in _warned:
        return
    _warned.add(model)
    experts = _nbytes(weight for module in every_experts(model) for weight in module.parameters())
    share = experts / _nbytes(model.parameters())
    logger.warning(f"sonicmoe_hf: {UNPACKED_EXPERTS.format(model=type(model).__name__, share=share, dtype=dtype)}")


def warn_of_linear_layers_on_cpus(model: nn.Module) -> None:
    """Warn, once for a model and those in it, of linear layers that bitsandbytes lays out for inference when they are
    evaluated."""
    layers = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)]
    if any(layer.weight.device.type == "cpu" and layer not in _warned_on_cpus for layer in layers):
        _warned_on_cpus.update(layers)
        logger.warning(f"sonicmoe_hf: {ON_CPUS.format(model=type(model).__name__)}")


def _nbytes(weights: Iterable[Any]) -> int:
    return sum(weight.nbytes for weight in weights)
