"""Verdict: which hypothesis of what became of an adapter explains the log-probabilities that a place gives.

Letters: T tokens. All vectors hold a token's log-probability, less that of the likeliest one where a place tells its
choice alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hypotheses import EXPERTS, KNOWN, LEFT_OUT, Hypothesis

APPLIED, NOT_APPLIED, IN_PART, OTHER = "applied", "not applied", "applied in part", "other"
CERTAIN = 3.0  # standard deviations by which one hypothesis must explain more than another
NEAR = 0.25  # of the adapter's change: by so much a share of it may be off one
UNEXPLAINED = 0.5  # of the adapter's change: more that no hypothesis explains is something else
TOO_LITTLE = "the adapter changes these texts too little to tell; give text like that it was trained on, --text"


class Reference(NamedTuple):
    """The log-probabilities [T] of the model that was trained, at a place's tokens.

    alternatives: by hypothesis.
    """

    base: torch.Tensor
    adapter: torch.Tensor
    alternatives: list[tuple[Hypothesis, torch.Tensor]]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The adapter's change, or that by its experts and that by the rest."""
        without = next((value for each, value in self.alternatives if each.name == EXPERTS), None)
        if without is None:
            return {"all": self.adapter - self.base}
        return {"experts": self.adapter - without, "rest": without - self.base}


class Verdict(NamedTuple):
    """The verdict on a place.

    kind: one of the four. reason: a sentence, or "". from_adapter, from_base: mean |difference| of a token. shares: of
    each part of the adapter's change how much is there, 1 for all of it.
    """

    kind: str
    reason: str
    from_adapter: float
    from_base: float
    shares: dict[str, float]


def rms(x: torch.Tensor) -> float:
    """Return the root of the mean square."""
    return x.square().mean().sqrt().item()


def judge(found: torch.Tensor, reference: Reference, own_base: torch.Tensor | None = None) -> Verdict:
    """Judge what a place gives [T]. own_base: what it gives without the adapter, if it was asked for the same tokens:
    then its other differences from the reference, such as those of its dtype, are taken out."""
    if own_base is not None and rms(own_base - reference.adapter) < rms(own_base - reference.base):
        own_base = None  # which has the adapter, too
    noise = 0.0 if own_base is None else rms(own_base - reference.base)
    measured = found if own_base is None else found - own_base + reference.base
    shares, errors = _shares(measured - reference.base, reference.parts)
    kind, reason = _judged(measured, reference, noise, shares, errors)
    from_adapter, from_base = ((found - other).abs().mean().item() for other in (reference.adapter, reference.base))
    return Verdict(kind, reason, from_adapter, from_base, shares)


def _shares(change: torch.Tensor, parts: dict[str, torch.Tensor]) -> tuple[dict[str, float], list[float]]:
    """Fit `change` by a sum of shares of the parts, by least squares: the shares, and their standard errors."""
    directions = torch.stack(list(parts.values()), dim=1)  # [T, parts]
    inverse = torch.linalg.pinv(directions)
    shares = inverse @ change
    errors = rms(change - directions @ shares) * inverse.norm(dim=1)
    return dict(zip(parts, shares.tolist())), errors.tolist()


def _explains_more(found: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether `found` is nearer to `one` than to `other`, and not by chance."""
    apart = other - one
    from_middle = torch.dot((one + other) / 2 - found, apart)
    return bool(apart.any()) and from_middle.item() > CERTAIN * rms(found - one) * apart.norm().item()


def _judged(
    found: torch.Tensor, reference: Reference, noise: float, shares: dict[str, float], errors: list[float]
) -> tuple[str, str]:
    effect = rms(reference.adapter - reference.base)
    better = [each for each in reference.alternatives if _explains_more(found, each[1], reference.adapter)]
    nearest, value = min(better, key=lambda each: rms(found - each[1]), default=(None, reference.adapter))
    if _explains_more(found, reference.base, reference.adapter) and rms(found - reference.base) <= rms(found - value):
        nearest, value = None, reference.base
    if effect and rms(found - value) > max(UNEXPLAINED * effect, 2 * noise):
        return OTHER, _unexplained(shares)
    if value is reference.base:
        return NOT_APPLIED, "equals the base"
    if nearest is not None:
        hint = KNOWN.get(nearest.name)
        kind, reason = (IN_PART, f"without {nearest.name}") if nearest.kind == LEFT_OUT else (OTHER, nearest.name)
        return kind, f"{reason}: {hint}" if hint else reason
    if max(errors) > NEAR / 2 or not _explains_more(found, reference.adapter, reference.base):
        return OTHER, TOO_LITTLE
    if missing := [f"{share:.0%} of the change ({part})" for part, share in shares.items() if share < 1 - NEAR]:
        return IN_PART, " and ".join(missing)
    return (OTHER, _unexplained(shares)) if max(shares.values()) > 1 + NEAR else (APPLIED, "")


def _unexplained(shares: dict[str, float]) -> str:
    if all(abs(share - 1) <= NEAR for share in shares.values()):
        return "all of the change is there, beside other differences as large: another base, or its quantization"
    there = " and ".join(f"{share:.0%} of the change ({part})" for part, share in shares.items())
    return f"{there}, beside other differences: another adapter, base or quantization"
