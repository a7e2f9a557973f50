"""Tests of hypotheses: how far a place is from the trained model with its adapter towards that under each hypothesis."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .evidence import CLEAR_LACK, USUAL_LACK, Evidence
from .hypotheses import MISREAD, THE_BASE, Hypothesis
from .regression import fit

CONFIDENCE = 3.0  # standard deviations by which a hypothesis must differ from the adapter
SAME_DIRECTION = 0.95  # |cosine| of two directions from which on a fit does not tell them apart


class HypothesisTest(NamedTuple):
    """Test of a hypothesis, which may be THE_BASE.

    log_p: log-probabilities [T] under it. size: the rms difference from the adapter that it makes, without the rounding
    of the runs. coefficient: how far the place is from the adapter towards the hypothesis, 0 for not at all and 1 for all
    the way. error: of the coefficient.
    """

    hypothesis: Hypothesis
    log_p: torch.Tensor
    size: float
    coefficient: float
    error: float

    @property
    def is_true(self) -> bool:
        return self.coefficient - self.error > 0.5

    @property
    def is_partly_true(self) -> bool:
        return self.min_coefficient > USUAL_LACK

    @property
    def is_false(self) -> bool:
        return self.max_coefficient < CLEAR_LACK

    @property
    def is_of_misreading(self) -> bool:
        return self.hypothesis.kind == MISREAD

    @property
    def min_coefficient(self) -> float:
        """Bound from below how far the coefficient is from 0. An adapter cannot be misread by a coefficient below 0."""
        return (self.coefficient if self.is_of_misreading else abs(self.coefficient)) - self.error

    @property
    def max_coefficient(self) -> float:
        return self.min_coefficient + 2 * self.error


def run_tests(evidence: Evidence) -> list[HypothesisTest]:
    """Test each hypothesis that differs from the adapter. A place whose whole change is a bit smaller, as by bf16's
    rounding, is no evidence for any of them, so the change's own coefficient is fitted beside the hypothesis's."""
    reference = evidence.reference
    change, residual = reference.change, evidence.observed - reference.adapter.first
    tests = []
    for hypothesis, runs in [(THE_BASE, reference.base), *reference.alternatives]:
        direction = runs - reference.adapter
        if not direction.first.any():
            continue
        cosine = torch.cosine_similarity(direction.first, change.first, dim=0)
        alone = hypothesis is THE_BASE or abs(cosine.item()) > SAME_DIRECTION
        coefficients, errors = fit(residual, [direction] if alone else [direction, change])
        test = HypothesisTest(hypothesis, runs.first, direction.size, coefficients[0], CONFIDENCE * errors[0])
        tests.append(test)
    return tests
