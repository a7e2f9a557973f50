"""Experts that stay dense in a quantized model: bitsandbytes quantizes linear layers alone."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..layer.packed_weight import PackedWeight
from .support import every_experts

logger = logging.getLogger(__name__)
DENSE = (
    "bitsandbytes has quantized the linear layers of {model}, but its experts, {share:.0%} of its bytes, stay in "
    '{dtype}: pack them, by sonicmoe_hf.from_pretrained(..., experts_quantization="nf4") or sonicmoe-hf run '
    "--experts-quantization nf4"
)
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


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
    logger.warning(f"sonicmoe_hf: {DENSE.format(model=type(model).__name__, share=share, dtype=dtype)}")


def _nbytes(weights: Iterable[Any]) -> int:
    return sum(weight.nbytes for weight in weights)
