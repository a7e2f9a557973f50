"""How two tensors compare."""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, Frobenius norms in fp64; of a zero tensor, the norm of the difference."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale if scale > 0 else 1.0)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes: unlike torch.equal, NaN equals itself and 0 is not -0."""
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
