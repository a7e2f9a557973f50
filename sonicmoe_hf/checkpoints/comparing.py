"""Comparisons of two tensors."""

from __future__ import annotations

import math

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Compute |actual - expected| / |expected|, Frobenius norms in fp64; of a zero tensor, the norm of the difference.
    Infinite where either holds a NaN."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().item()
    error = (actual - expected).norm().item() / (scale if scale > 0 else 1.0)
    return float("inf") if math.isnan(error) else error


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Say whether two tensors have the same dtype, shape and bytes: unlike torch.equal, NaN is NaN, and 0 is not -0."""
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
