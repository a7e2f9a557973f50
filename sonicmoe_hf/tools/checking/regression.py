"""Regression of one difference of log-probabilities on others, each of which is run twice. Letters: T tokens.

In bf16 the trained model's own rounding is in each difference of two of its runs, and in what a place seems to lack, so
that a fit of one to the other by least squares finds parts missing that are there. Each run is therefore made twice, with
other rounding: the second ones are instruments (instrumental variables), whose errors are not those of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MIN_SLACK = 0.01  # 1 - leverage of a token: where one token decides a coefficient, its residual is 0, and so is this


class Runs(NamedTuple):
    """A model's log-probabilities [T], or differences of them, in two runs that differ in their rounding. Where that
    is exact they are the same."""

    first: torch.Tensor
    second: torch.Tensor

    def __sub__(self, other: Runs) -> Runs:
        return Runs(self.first - other.first, self.second - other.second)

    @property
    def is_exact(self) -> bool:
        """Tell whether both runs are the same."""
        return torch.equal(self.first, self.second)

    @property
    def size(self) -> float:
        """Compute the root of the mean square of a difference, without the rounding of the runs."""
        return (self.first * self.second).mean().clamp(min=0).sqrt().item()


def rms(x: torch.Tensor) -> float:
    """Compute the root of the mean square."""
    return x.square().mean().sqrt().item()


def fit(difference: torch.Tensor, directions: Sequence[Runs]) -> tuple[list[float], list[float]]:
    """Fit `difference` [T] by directions, whose second runs are the instruments; where both runs are the same, that is by
    least squares. Returns the coefficients of the directions and their standard errors.

    A few tokens, for which a router chooses other experts, may make most of a difference, so tokens have different
    variances, and each one's is estimated by the others' fit (HC3: MacKinnon and White 1985).
    """
    matrix = torch.stack([direction.first for direction in directions], dim=-1)  # [T, directions]
    instruments = torch.stack([direction.second for direction in directions], dim=-1)
    inverse = torch.linalg.pinv(instruments.T @ matrix) @ instruments.T
    coefficients = inverse @ difference
    leverage = (matrix * inverse.T).sum(dim=1)
    residual = (difference - matrix @ coefficients) / (1 - leverage).clamp(min=MIN_SLACK)
    return coefficients.tolist(), (inverse * residual).norm(dim=1).tolist()


def residual_of(difference: torch.Tensor, directions: Sequence[Runs]) -> torch.Tensor:
    """Subtract from `difference` [T] what its fit by the directions explains."""
    coefficients, _ = fit(difference, directions)
    return difference - sum(coefficient * each.first for coefficient, each in zip(coefficients, directions))
