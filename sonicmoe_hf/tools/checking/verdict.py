"""Verdict: which hypothesis of what became of an adapter explains the log-probabilities that a place gives.

Letters: T tokens. All vectors hold a token's log-probability, less that of the likeliest one where a place tells its
choice alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...checkpoints.roundings import UNMERGED
from .hypotheses import EXPERTS, KNOWN, LEFT_OUT, Hypothesis

APPLIED, NOT_APPLIED, IN_PART, OTHER = "applied", "not applied", "applied in part", "other"
CANNOT_TELL = "cannot tell"
ENOUGH = 30  # tokens: of fewer a standard deviation is not known well enough to count in
CERTAIN = 3.0  # standard deviations by which a hypothesis must be told from the adapter
FLOOR = 1e-4  # of the adapter's change: fp32's own differences, as of another order of summation, are a few 1e-6 of it
# Of bf16, measured of right places by benchmarks.quality.check_defects' model, whose noise is 0.10 to 0.15 of the change:
ROUNDING = 2.0  # times the noise: they differ by 0.63 to 1.05 times it, which is known by one draw
SMALL = 0.01  # of the adapter's change: a tenth of the noise, which hides such a part
PARTLY = 0.25  # of a part: they have 0.978 to 1.004 of experts and rest, of which larger models may keep less
NEAR = 0.1  # of all of the change: they have 0.996 to 0.999 of it
UNEXPLAINED = 0.5  # of the adapter's change: more is something else, where the noise of the place is not known
ROUNDED = "merged and rounded"
LOST = f"merge it by --rounding dithered, or {UNMERGED}"
NO_CHANGE = "the adapter itself changes nothing: its lora_B is zero, or lost in the rounding of --dtype"
TOO_FEW = "{} tokens are too few to tell, give a longer --text"
TOO_LITTLE = (
    "what the adapter changes of these texts ({}) is too little to tell beside other differences; add --dtype float32, "
    "or longer text like that it was trained on, --text"
)


class Reference(NamedTuple):
    """The log-probabilities [T] of the model that was trained, at a place's tokens.

    alternatives: by hypothesis. noise: rms of a token's difference that rounding makes of two of these runs, 0 where they
    are exact.
    """

    base: torch.Tensor
    adapter: torch.Tensor
    alternatives: list[tuple[Hypothesis, torch.Tensor]]
    noise: float = 0.0

    def bias(self, direction: torch.Tensor, residual: torch.Tensor) -> float:
        """Return how much of `direction`, a difference of two runs [T], is their rounding: a factor fitted to it is wrong
        by as much, however many tokens there are. residual: of a place from the adapter [T], which bounds it."""
        size = rms(direction)
        return min((self.noise / size) ** 2, rms(residual) / size) if size else 0.0

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

    kind: one of the five. reason: a sentence, or "". from_adapter, from_base: mean |difference| of a token. shares: of
    each part of the adapter's change how much is there, 1 for all of it; None where the texts do not tell. may_be_scaled:
    whether the change by another scale might explain what was found, which no rounding gives.
    """

    kind: str
    reason: str
    from_adapter: float
    from_base: float
    shares: dict[str, float | None]
    may_be_scaled: bool


class _Judgement(NamedTuple):
    """Kind and reason of a verdict. is_share: whether the reason is how much of the change is there, and no name."""

    kind: str
    reason: str = ""
    is_share: bool = False


def rms(x: torch.Tensor) -> float:
    """Return the root of the mean square."""
    return x.square().mean().sqrt().item()


def judge(
    found: torch.Tensor,
    reference: Reference,
    own_base: torch.Tensor | None = None,
    noise: float | None = None,
    is_rounded: bool = False,
) -> Verdict:
    """Judge what a place gives [T].

    own_base: what it gives without the adapter, if it was asked for the same tokens: then its other differences from the
    reference, such as those of its dtype, are taken out, and are the noise. noise: rms of a token's difference that the
    place's rounding makes; None where neither is known, as of other quantization. is_rounded: whether it is a checkpoint
    of packed weights, in which rounding may have dropped a part of the change, or hides it in noise.
    """
    if own_base is not None and rms(own_base - reference.adapter) < rms(own_base - reference.base):
        own_base = None  # which has the adapter, too
    if own_base is not None:
        noise = max(noise or 0.0, rms(own_base - reference.base))
    measured = found if own_base is None else found - own_base + reference.base
    shares = _shares(measured - reference.base, reference)
    kind, reason, is_share = _judged(measured, reference, noise, shares, is_rounded)
    from_adapter, from_base = ((found - other).abs().mean().item() for other in (reference.adapter, reference.base))
    return Verdict(kind, reason, from_adapter, from_base, shares, kind == OTHER or is_share)


def limit_of(reference: Reference, noise: float | None) -> float:
    """Return the rms difference from the expected change up to which a place counts as applied."""
    effect = rms(reference.adapter - reference.base)
    return UNEXPLAINED * effect if noise is None else ROUNDING * noise + FLOOR * effect


def _shares(change: torch.Tensor, reference: Reference) -> dict[str, float | None]:
    """Fit `change` by a sum of shares of the parts, by least squares. A share of a large error is None."""
    if not (parts := reference.parts):
        return {}
    shares, errors = _fit(change, list(parts.values()))
    residual = change - (reference.adapter - reference.base)
    errors = [max(error, reference.bias(part, residual)) for error, part in zip(errors, parts.values())]
    return {part: share if error <= PARTLY / 2 else None for part, share, error in zip(parts, shares, errors)}


def _fit(change: torch.Tensor, directions: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Fit by least squares; returns the factors of the directions and their standard errors."""
    matrix = torch.stack(directions, dim=1)  # [T, directions]
    inverse = torch.linalg.pinv(matrix)
    factors = inverse @ change
    errors = rms(change - matrix @ factors) * inverse.norm(dim=1)
    return factors.tolist(), errors.tolist()


class _Told(NamedTuple):
    """Test of a hypothesis: the factor of it that is true, 0 for none and 1 for all, and the standard error of that."""

    hypothesis: Hypothesis | None
    value: torch.Tensor
    size: float
    factor: float
    error: float

    @property
    def is_true(self) -> bool:
        return self.factor - CERTAIN * self.error > 0.5

    @property
    def is_partly_true(self) -> bool:
        return self.factor - CERTAIN * self.error > PARTLY

    @property
    def is_false(self) -> bool:
        return self.factor + CERTAIN * self.error < 0.5


def _told(found: torch.Tensor, reference: Reference) -> list[_Told]:
    """Test each hypothesis that differs from the adapter, by more than the rounding of both. A place that takes some of
    all of the change, as bf16 does, is no evidence of one: its share is fitted beside."""
    change, residual = reference.adapter - reference.base, found - reference.adapter
    tests = []
    for hypothesis, value in [(None, reference.base), *reference.alternatives]:
        direction = value - reference.adapter
        if not direction.any() or reference.bias(direction, residual) > PARTLY / 2:
            continue
        alone = hypothesis is None or abs(torch.cosine_similarity(direction, change, dim=0).item()) > 0.95
        factors, errors = _fit(residual, [direction] if alone else [direction, change])
        tests.append(_Told(hypothesis, value, rms(direction), factors[0], errors[0]))
    return tests


def _judged(
    found: torch.Tensor,
    reference: Reference,
    noise: float | None,
    shares: dict[str, float | None],
    is_rounded: bool,
) -> _Judgement:
    effect = rms(reference.adapter - reference.base)
    if not effect or len(found) < ENOUGH:
        return _Judgement(CANNOT_TELL, TOO_FEW.format(len(found)) if effect else NO_CHANGE)
    limit, beside = limit_of(reference, noise), rms(found - reference.adapter)
    tests = _told(found, reference)
    nearest = min(tests, key=lambda each: rms(found - each.value), default=None)
    explained = [each for each in tests if each.is_true and rms(found - each.value) < beside]
    is_named = nearest is not None and nearest in explained and beside > FLOOR * effect
    hypothesis = None if nearest is None else nearest.hypothesis
    if is_named and nearest is not None:
        is_named = rms(found - nearest.value) <= max(limit, PARTLY * beside)
    may_be_lost = not is_named or hypothesis is None or hypothesis.name == EXPERTS
    if is_rounded and may_be_lost and (rounded := _rounded(found - reference.base, reference.parts, shares, effect)):
        return rounded
    if is_named:
        return _named(hypothesis)
    known = {part: share for part, share in shares.items() if share is not None}
    if beside > limit:
        missing = {part: share for part, share in known.items() if share < 1 - PARTLY}
        if missing and rms(_rest(found - reference.base, reference.parts)) < UNEXPLAINED * effect:
            return _Judgement(IN_PART, _listed(missing), is_share=True)
        return _Judgement(OTHER, _unexplained(known, beside / effect))
    (share,), (error,) = _fit(found - reference.base, [reference.adapter - reference.base])
    if abs(share - 1) - CERTAIN * error > NEAR + reference.bias(
        reference.adapter - reference.base, found - reference.adapter
    ):
        return _Judgement(IN_PART if share < 1 else OTHER, f"{share:.0%} of the change", is_share=True)
    if missing := {part: share for part, share in known.items() if share < 1 - PARTLY}:
        return _Judgement(IN_PART, _listed(missing), is_share=True)
    partly = [each for each in tests if each.hypothesis and each.is_partly_true and each.size >= SMALL * effect]
    if partly:
        most = max(partly, key=lambda each: each.factor * each.size)
        kind, reason, _ = _named(most.hypothesis)
        return _Judgement(kind, f"about {min(most.factor, 1):.0%} of this: {reason}", is_share=True)
    unclear = [part for part in shares if part not in known]
    unclear += [
        "all" if each.hypothesis is None else each.hypothesis.name
        for each in tests
        if not each.is_false and each.size >= SMALL * effect
    ]
    if unclear:
        return _Judgement(CANNOT_TELL, TOO_LITTLE.format(", ".join(unclear[:4])))
    return _Judgement(APPLIED)


def _named(hypothesis: Hypothesis | None) -> _Judgement:
    if hypothesis is None:
        return _Judgement(NOT_APPLIED, "equals the base")
    hint = KNOWN.get(hypothesis.name)
    left_out = hypothesis.kind == LEFT_OUT
    reason = f"without {hypothesis.name}" if left_out else hypothesis.name
    return _Judgement(IN_PART if left_out else OTHER, f"{reason}: {hint}" if hint else reason)


def _rounded(
    change: torch.Tensor, parts: dict[str, torch.Tensor], shares: dict[str, float | None], effect: float
) -> _Judgement | None:
    """Say how much of the adapter's change is in packed weights; None where the texts do not tell, or it is more or so
    little that something else may be there."""
    known = {part: share for part, share in shares.items() if share is not None}
    if len(known) < len(shares) or not known:
        return None
    noise, (part, least) = rms(_rest(change, parts)), min(known.items(), key=lambda each: each[1])
    if max(known.values()) > 1 + PARTLY or (least < PARTLY and noise > UNEXPLAINED * effect):
        return None
    there = f"{max(least, 0.0):.0%} of the change" + ("" if len(parts) == 1 else f" ({part})")
    reason = f"{ROUNDED}: {there} is there, beside noise {noise / effect:.1f} times as large as it"
    if least >= 1 - PARTLY:
        return _Judgement(APPLIED, reason)
    return _Judgement(NOT_APPLIED if max(known.values()) < NEAR else IN_PART, f"{reason}; {LOST}")


def _rest(change: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    factors, _ = _fit(change, list(parts.values()))
    return change - sum(factor * part for factor, part in zip(factors, parts.values()))


def _listed(shares: dict[str, float]) -> str:
    return " and ".join(f"{share:.0%} of the change ({part})" for part, share in shares.items())


def _unexplained(shares: dict[str, float], beside: float) -> str:
    """Say what is there of the change; beside: how large other differences are, in the size of the adapter's."""
    there = f"{_listed(shares)}, beside " if shares else ""
    return (
        f"{there}other differences, {beside:.2g} times as large as the adapter's change: another adapter, base or "
        "quantization"
    )
