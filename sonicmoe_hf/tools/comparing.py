"""The relative error of a tensor, by which the demo, tests and benchmarks compare."""

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
