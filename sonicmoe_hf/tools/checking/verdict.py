"""Verdict: which hypothesis of what became of an adapter explains the log-probabilities that a place gives.

Letters: T tokens. All vectors hold a token's log-probability, less that of the likeliest one where a place tells its
choice alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hypotheses import EXPERTS, KNOWN, LEFT_OUT, Hypothesis

APPLIED, NOT_APPLIED, IN_PART, OTHER = "applied", "not applied", "applied in part", "other"
ENOUGH = 30  # tokens: of fewer a standard deviation is not known well enough to count in
CERTAIN = 3.0  # standard deviations by which one hypothesis must explain more than another
EXPLAINED = (
    0.2  # of the other's squared distance, that too: bf16 takes some percent off every change, which is no chance
)
NEAR = 0.25  # of a part of the adapter's change: by so much its share may be off one; it is known to half of that
UNEXPLAINED = 0.5  # of the adapter's change: more that no hypothesis explains is something else
NO_CHANGE = "the adapter itself changes nothing: its lora_B is zero, or lost in the rounding of --dtype"
TOO_FEW = "{} tokens are too few to tell, give a longer --text"
TOO_LITTLE = (
    "what the adapter changes of these texts ({}) is too little to tell beside other differences; give text like that it "
    "was trained on, --text"
)


class Reference(NamedTuple):
    """The log-probabilities [T] of the model that was trained, at a place's tokens.

    alternatives: by hypothesis.
    """

    base: torch.Tensor
    adapter: torch.Tensor
    alternatives: list[tuple[Hypothesis, torch.Tensor]]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The adapter's change, or that by its experts and that by the rest; none that is zero."""
        without = next((value for each, value in self.alternatives if each.name == EXPERTS), None)
        if without is None:
            parts = {"all": self.adapter - self.base}
        else:
            parts = {"experts": self.adapter - without, "rest": without - self.base}
        return {name: change for name, change in parts.items() if change.any()}


class Verdict(NamedTuple):
    """The verdict on a place.

    kind: one of the four. reason: a sentence, or "". from_adapter, from_base: mean |difference| of a token. shares: of
    each part of the adapter's change how much is there, 1 for all of it; None where the texts do not tell.
    """

    kind: str
    reason: str
    from_adapter: float
    from_base: float
    shares: dict[str, float | None]


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
    shares = _shares(measured - reference.base, reference.parts)
    kind, reason = _judged(measured, reference, noise, shares)
    from_adapter, from_base = ((found - other).abs().mean().item() for other in (reference.adapter, reference.base))
    return Verdict(kind, reason, from_adapter, from_base, shares)


def _shares(change: torch.Tensor, parts: dict[str, torch.Tensor]) -> dict[str, float | None]:
    """Fit `change` by a sum of shares of the parts, by least squares. A share of a large standard error is None."""
    if not parts:
        return {}
    directions = torch.stack(list(parts.values()), dim=1)  # [T, parts]
    inverse = torch.linalg.pinv(directions)
    shares = inverse @ change
    errors = rms(change - directions @ shares) * inverse.norm(dim=1)
    return {
        part: share if error <= NEAR / 2 else None
        for part, share, error in zip(parts, shares.tolist(), errors.tolist())
    }


def _explains_more(found: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether `found` is nearer to `one` than to `other`, by much and not by chance."""
    apart, distance = other - one, rms(found - one)
    from_middle = torch.dot((one + other) / 2 - found, apart)
    is_certain = bool(apart.any()) and from_middle.item() > CERTAIN * distance * apart.norm().item()
    return is_certain and distance**2 <= (1 - EXPLAINED) * rms(found - other) ** 2


def _judged(
    found: torch.Tensor, reference: Reference, noise: float, shares: dict[str, float | None]
) -> tuple[str, str]:
    effect = rms(reference.adapter - reference.base)
    if not effect or len(found) < ENOUGH:
        return OTHER, TOO_FEW.format(len(found)) if effect else NO_CHANGE
    better = [each for each in reference.alternatives if _explains_more(found, each[1], reference.adapter)]
    nearest, value = min(better, key=lambda each: rms(found - each[1]), default=(None, reference.adapter))
    if _explains_more(found, reference.base, reference.adapter) and rms(found - reference.base) <= rms(found - value):
        nearest, value = None, reference.base
    known = {part: share for part, share in shares.items() if share is not None}
    beside = rms(found - value)
    if beside > max(UNEXPLAINED * effect, 2 * noise):
        return OTHER, _unexplained(known, beside / effect)
    if value is reference.base:
        return NOT_APPLIED, "equals the base"
    if nearest is not None:
        hint = KNOWN.get(nearest.name)
        kind, reason = (IN_PART, f"without {nearest.name}") if nearest.kind == LEFT_OUT else (OTHER, nearest.name)
        return kind, f"{reason}: {hint}" if hint else reason
    if missing := {part: share for part, share in known.items() if share < 1 - NEAR}:
        return IN_PART, _listed(missing)
    if len(known) < len(shares) or not _explains_more(found, reference.adapter, reference.base):
        return OTHER, TOO_LITTLE.format(", ".join(part for part in shares if part not in known) or "all")
    return (OTHER, _unexplained(known, beside / effect)) if max(known.values()) > 1 + NEAR else (APPLIED, "")


def _listed(shares: dict[str, float]) -> str:
    return " and ".join(f"{share:.0%} of the change ({part})" for part, share in shares.items())


def _unexplained(shares: dict[str, float], beside: float) -> str:
    """Say what is there of the change; beside: how large other differences are, in the size of the adapter's."""
    there = f"{_listed(shares)}, beside " if shares else ""
    return (
        f"{there}other differences, {beside:.2g} times as large as the adapter's change: another adapter, base or "
        "quantization"
    )
