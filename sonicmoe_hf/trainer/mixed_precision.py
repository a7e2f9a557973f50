"""The dtype that a trainer computes in."""

from __future__ import annotations

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computing_dtype(weights: torch.dtype, mixed_precision: str) -> torch.dtype:
    """Choose the dtype of autocast under accelerate's `mixed_precision`, or else that of the weights."""
    return AUTOCAST.get(mixed_precision, weights)
