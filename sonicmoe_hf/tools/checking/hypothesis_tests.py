"""Tests of hypotheses: how far a place is from the trained model with its adapter towards that under each hypothesis."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hypotheses import EXPERTS, MISREAD, Hypothesis
from .regression import Runs, fit, rms

CONFIDENCE = 3.0  # standard deviations by which a hypothesis must differ from the adapter
# In bf16, as measured in places that do apply the adapter (benchmarks.quality.check_defects):
USUAL_LACK = 0.1  # of a part: these places lack -0.03 to 0.03 of each, and larger models may lack more
CLEAR_LACK = 0.25  # of a part: where it is open whether more is missing, the verdict is open too


class Reference(NamedTuple):
    """The log-probabilities of the trained model at a place's tokens: of the base, with the adapter, and under each
    hypothesis."""

    base: Runs
    adapter: Runs
    alternatives: list[tuple[Hypothesis, Runs]]

    @property
    def change(self) -> Runs:
        """Compute the adapter's change of the base."""
        return self.adapter - self.base

    @property
    def effect(self) -> float:
        """Compute the rms change of a token."""
        return rms(self.change.first)

    @property
    def parts(self) -> dict[str, Runs]:
        """Split the adapter's change into that by its experts and that by the rest, if it has both; without any that is
        zero."""
        without = next((runs for each, runs in self.alternatives if each.name == EXPERTS), None)
        if without is None:
            parts = {"all": self.change}
        else:
            parts = {"experts": self.adapter - without, "rest": without - self.base}
        return {name: change for name, change in parts.items() if change.first.any()}


class HypothesisTest(NamedTuple):
    """Test of a hypothesis, None for the base.

    log_p: log-probabilities [T] under it. size: the rms difference from the adapter that it makes, without the rounding
    of the runs. coefficient: how far the place is from the adapter towards the hypothesis, 0 for not at all and 1 for all
    the way. error: of the coefficient.
    """

    hypothesis: Hypothesis | None
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
        return self.hypothesis is not None and self.hypothesis.kind == MISREAD

    @property
    def min_coefficient(self) -> float:
        """Bound from below how far the coefficient is from 0. An adapter cannot be misread by a coefficient below 0."""
        return (self.coefficient if self.is_of_misreading else abs(self.coefficient)) - self.error

    @property
    def max_coefficient(self) -> float:
        return self.min_coefficient + 2 * self.error


def run_tests(observed: torch.Tensor, reference: Reference) -> list[HypothesisTest]:
    """Test each hypothesis that differs from the adapter. A place whose whole change is a bit smaller, as by bf16's
    rounding, is no evidence for any of them, so the change's own coefficient is fitted beside the hypothesis's."""
    change, residual = reference.change, observed - reference.adapter.first
    tests = []
    for hypothesis, runs in [(None, reference.base), *reference.alternatives]:
        direction = runs - reference.adapter
        if not direction.first.any():
            continue
        cosine = torch.cosine_similarity(direction.first, change.first, dim=0)
        alone = hypothesis is None or abs(cosine.item()) > 0.95
        coefficients, errors = fit(residual, [direction] if alone else [direction, change])
        test = HypothesisTest(hypothesis, runs.first, direction.size, coefficients[0], CONFIDENCE * errors[0])
        tests.append(test)
    return tests
