"""Evidence on a place: the log-probabilities that it gives beside those of the trained model, and how far they differ.

Letters: T tokens. All vectors hold a token's log-probability, less that of the likeliest token where all that a place
gives is its first choices. A place's change is what it gives less the base's; the adapter's, what the trained model gives
less the base's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hypotheses import EXPERTS, Hypothesis
from .regression import Runs, fit, residual_of, rms

FP32_FLOOR = 1e-4  # of the adapter's change: in fp32 another order of summation makes differences of a few 1e-6 of it
# In bf16, as measured in places that do apply the adapter (benchmarks.quality.check_defects):
USUAL_LACK = 0.1  # of a part: these places lack -0.03 to 0.03 of each, and larger models may lack more
CLEAR_LACK = 0.25  # of a part: where it is open whether more is missing, the verdict is open too
MAX_NOISE_RATIO = 2.0  # these places differ by 0.63 to 1.05 times the noise, which is known by one draw
MAX_UNEXPLAINED = 0.5  # of the adapter's change: more must be something else, where the place's noise is not known

Alternatives = list[tuple[Hypothesis, Runs]]  # the trained model's log-probabilities under hypotheses


class Reference(NamedTuple):
    """The log-probabilities of the trained model at a place's tokens: of the base, with the adapter, and under each
    hypothesis."""

    base: Runs
    adapter: Runs
    alternatives: Alternatives

    @property
    def change(self) -> Runs:
        """Compute the adapter's change."""
        return self.adapter - self.base

    @property
    def effect(self) -> float:
        """Compute the rms of the adapter's change of a token."""
        return rms(self.change.first)

    @property
    def parts(self) -> dict[str, Runs]:
        """Split the adapter's change into that by its experts and that by the rest, if it has both; without any that is
        zero."""
        without_experts = next((runs for each, runs in self.alternatives if each.name == EXPERTS), None)
        if without_experts is None:
            parts = {"all": self.change}
        else:
            parts = {"experts": self.adapter - without_experts, "rest": without_experts - self.base}
        return {name: change for name, change in parts.items() if change.first.any()}


class Evidence(NamedTuple):
    """The log-probabilities of a place beside the reference, and the noise in them.

    log_p: the log-probabilities [T] that it gives. own_base: those that it gives without the adapter, where they are
    known for the same tokens. rounding_noise: rms of a token's difference that its rounding makes; None where that is
    not known, as of packed weights. rounding_remedy: the remedy of a checkpoint of packed weights, in which rounding may
    have dropped some of the change, or hides it in noise; None of others.
    """

    log_p: torch.Tensor
    reference: Reference
    own_base: torch.Tensor | None = None
    rounding_noise: float | None = None
    rounding_remedy: str | None = None

    @property
    def is_packed(self) -> bool:
        return self.rounding_remedy is not None

    def with_alternatives(self, alternatives: Alternatives) -> Evidence:
        """Add further hypotheses to the reference."""
        reference = self.reference
        return self._replace(reference=reference._replace(alternatives=[*reference.alternatives, *alternatives]))

    @property
    def own_base_without_adapter(self) -> torch.Tensor | None:
        """Take own_base, unless the place has the adapter there too."""
        base, adapter = self.reference.base.first, self.reference.adapter.first
        own_base = self.own_base
        return None if own_base is None or rms(own_base - adapter) < rms(own_base - base) else own_base

    @property
    def observed(self) -> torch.Tensor:
        """Subtract from log_p how the place's own base differs from the reference's, as by its dtype."""
        own_base = self.own_base_without_adapter
        return self.log_p if own_base is None else self.log_p - own_base + self.reference.base.first

    @property
    def noise(self) -> float | None:
        """Compute the rms difference of a token that tells nothing: rounding's, or that of the place's own base."""
        own_base = self.own_base_without_adapter
        if own_base is None:
            return self.rounding_noise
        return max(self.rounding_noise or 0.0, rms(own_base - self.reference.base.first))

    @property
    def change(self) -> torch.Tensor:
        """Compute the place's change."""
        return self.observed - self.reference.base.first

    def rms_from(self, log_p: torch.Tensor) -> float:
        """Compute the rms difference of what is observed."""
        return rms(self.observed - log_p)

    @property
    def rms_from_adapter(self) -> float:
        return self.rms_from(self.reference.adapter.first)

    @property
    def limit(self) -> float:
        """Compute the rms difference from the adapter up to which the place counts as applied."""
        effect, noise = self.reference.effect, self.noise
        return MAX_UNEXPLAINED * effect if noise is None else MAX_NOISE_RATIO * noise + FP32_FLOOR * effect

    def is_explained_by(self, log_p: torch.Tensor) -> bool:
        """Tell whether log_p is so near to what is observed that beside it nothing else need be there."""
        return self.rms_from(log_p) <= max(self.limit, CLEAR_LACK * self.rms_from_adapter)

    @property
    def shares(self) -> dict[str, float | None]:
        """Fit the place's change by a sum of shares of the parts; a share with a large error is None."""
        if not (parts := self.reference.parts):
            return {}
        shares, errors = fit(self.change, list(parts.values()))
        return {part: share if error <= CLEAR_LACK / 2 else None for part, share, error in zip(parts, shares, errors)}

    @property
    def known_shares(self) -> dict[str, float]:
        return {part: share for part, share in self.shares.items() if share is not None}

    @property
    def unexplained(self) -> float:
        """Compute the rms of what the parts leave of the place's change."""
        return rms(residual_of(self.change, list(self.reference.parts.values())))
