"""Verdict: which hypothesis of what became of an adapter explains the log-probabilities that a place gives.

Letters: T tokens. All vectors hold a token's log-probability, less that of the likeliest one where a place tells its
choice alone.

In bf16 the trained model's own rounding is in each difference of two of its runs, and in what a place seems to lack, so
that a fit of one to the other by least squares finds parts missing that are there. Each run is therefore made twice, with
other rounding: the second ones are instruments (instrumental variables), whose errors are not those of the first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hypotheses import EXPERTS, KNOWN, LEFT_OUT, MISREAD, Hypothesis

APPLIED, NOT_APPLIED, IN_PART, OTHER = "applied", "not applied", "applied in part", "other"
CANNOT_TELL = "cannot tell"
ENOUGH = 30  # tokens: of fewer a standard deviation is not known well enough to count in
CERTAIN = 3.0  # standard deviations by which a hypothesis must be told from the adapter
FLOOR = 1e-4  # of the adapter's change: fp32's own differences, as of another order of summation, are a few 1e-6 of it
# Of bf16, measured of right places by benchmarks.quality.check_defects:
ROUNDING = 2.0  # times the noise: they differ by 0.63 to 1.05 times it, which is known by one draw
SMALL = 0.05  # of the adapter's change: what a part that makes less than it does to the texts may hide in the noise
NEAR = 0.1  # of a part: they lack -0.03 to 0.03 of each, and larger models may lack more
PARTLY = 0.25  # of a part: where more than that may be missing, or may not, nothing is said
LEVERAGE = 0.01  # a token that alone decides a factor is off by nothing that could be divided
UNEXPLAINED = 0.5  # of the adapter's change: more is something else, where the noise of the place is not known
ROUNDED = "merged and rounded"
NO_CHANGE = "the adapter itself changes nothing: its lora_B is zero, or lost in the rounding of --dtype"
TOO_FEW = "{} tokens are too few to tell, give a longer --text"
TOO_LITTLE = "{} there; what the adapter changes of these texts is too little to tell more beside rounding: {}"
IN_FULL = "add --dtype float32"
MORE_TEXT = "give longer text like that it was trained on, --text"
UNPACKED = f"{MORE_TEXT}, or check what merge writes without --quantize"
WITH_BASE = "let the server have the base beside the adapter, which is then compared too"


class Reference(NamedTuple):
    """The log-probabilities [2, T] of two runs of the model that was trained, at a place's tokens: of the base, with the
    adapter, and by hypothesis. The runs differ in their rounding, and are the same where that is exact.
    """

    base: torch.Tensor
    adapter: torch.Tensor
    alternatives: list[tuple[Hypothesis, torch.Tensor]]

    @property
    def change(self) -> torch.Tensor:
        """The adapter's [2, T]."""
        return self.adapter - self.base

    @property
    def effect(self) -> float:
        """The rms change of a token."""
        return rms(self.change[0])

    @property
    def is_exact(self) -> bool:
        """Whether both runs are the same."""
        return torch.equal(*self.adapter)

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The adapter's change [2, T], or that by its experts and that by the rest; none that is zero."""
        without = next((value for each, value in self.alternatives if each.name == EXPERTS), None)
        if without is None:
            parts = {"all": self.change}
        else:
            parts = {"experts": self.adapter - without, "rest": without - self.base}
        return {name: change for name, change in parts.items() if change[0].any()}


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
    if_lost: str | None = None,
) -> Verdict:
    """Judge what a place gives [T].

    own_base: what it gives without the adapter, if it was asked for the same tokens: then its other differences from the
    reference, such as those of its dtype, are taken out, and are the noise. noise: rms of a token's difference that the
    place's rounding makes; None where neither is known, as of other quantization. if_lost: of a checkpoint of packed
    weights, in which rounding may have dropped a part of the change, or hides it in noise: what helps then.
    """
    measured, noise = beside_base(found, reference, own_base, noise)
    shares = _shares(measured - reference.base[0], reference)
    kind, reason, is_share = _judged(measured, reference, noise, shares, if_lost)
    from_adapter, from_base = (
        (found - other).abs().mean().item() for other in (reference.adapter[0], reference.base[0])
    )
    return Verdict(kind, reason, from_adapter, from_base, shares, kind == OTHER or is_share)


def beside_base(
    found: torch.Tensor, reference: Reference, own_base: torch.Tensor | None, noise: float | None
) -> tuple[torch.Tensor, float | None]:
    """Take the differences of a place's own base from the reference out of what it gives, and count them as noise; see
    `judge`."""
    if own_base is None or rms(own_base - reference.adapter[0]) < rms(own_base - reference.base[0]):
        return found, noise  # there is none, or it has the adapter too
    return found - own_base + reference.base[0], max(noise or 0.0, rms(own_base - reference.base[0]))


def limit_of(reference: Reference, noise: float | None) -> float:
    """Return the rms difference from the expected change up to which a place counts as applied."""
    return UNEXPLAINED * reference.effect if noise is None else ROUNDING * noise + FLOOR * reference.effect


def _shares(change: torch.Tensor, reference: Reference) -> dict[str, float | None]:
    """Fit `change` [T] by a sum of shares of the parts. A share of a large error is None."""
    if not (parts := reference.parts):
        return {}
    shares, errors = _fit(change, list(parts.values()))
    return {part: share if error <= PARTLY / 2 else None for part, share, error in zip(parts, shares, errors)}


def _fit(change: torch.Tensor, directions: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Fit `change` [T] by directions [2, T], whose second runs are the instruments; where both are one, that is by least
    squares. Returns the factors of the directions and their standard errors.

    A few tokens, for which a router takes other experts, may be most of a difference. So an error is that of tokens of
    different variance, each judged by the others (HC3: MacKinnon and White 1985).
    """
    matrix, instruments = torch.stack(directions, dim=-1)  # [T, directions]
    inverse = torch.linalg.pinv(instruments.T @ matrix) @ instruments.T
    factors = inverse @ change
    leverage = (matrix * inverse.T).sum(dim=1)
    residual = (change - matrix @ factors) / (1 - leverage).clamp(min=LEVERAGE)
    return factors.tolist(), (inverse * residual).norm(dim=1).tolist()


class _Told(NamedTuple):
    """Test of a hypothesis: the factor of it that is true, 0 for none and 1 for all, and by how much that may be wrong.

    size: the rms difference from the adapter that it makes, without the rounding of the runs.
    """

    hypothesis: Hypothesis | None
    value: torch.Tensor
    size: float
    factor: float
    error: float

    @property
    def is_true(self) -> bool:
        return self.factor - self.error > 0.5

    @property
    def is_partly_true(self) -> bool:
        return self.least > NEAR

    @property
    def is_false(self) -> bool:
        return self.most < PARTLY

    @property
    def least(self) -> float:
        """Compute how far the factor is from 0 at least. What was misread cannot be so by less than nothing."""
        is_misread = self.hypothesis is not None and self.hypothesis.kind == MISREAD
        return (self.factor if is_misread else abs(self.factor)) - self.error

    @property
    def most(self) -> float:
        return self.least + 2 * self.error

    @property
    def range(self) -> str:
        """Say how much of what the hypothesis leaves out is there."""
        if self.hypothesis is not None and self.hypothesis.kind == MISREAD:
            return f"up to {self.most:.0%} of this, {self.hypothesis.name},"
        name = "the change" if self.hypothesis is None else self.hypothesis.name
        return f"between {max(1 - self.factor - self.error, 0):.0%} and {1 - self.factor + self.error:.0%} of {name}"


def _told(found: torch.Tensor, reference: Reference) -> list[_Told]:
    """Test each hypothesis that differs from the adapter. A place that takes some of all of the change, as bf16 does, is
    no evidence of one: its share is fitted beside."""
    change, residual = reference.change, found - reference.adapter[0]
    tests = []
    for hypothesis, value in [(None, reference.base), *reference.alternatives]:
        direction = value - reference.adapter
        if not direction[0].any():
            continue
        cosine = torch.cosine_similarity(direction[0], change[0], dim=0)
        alone = hypothesis is None or abs(cosine.item()) > 0.95
        factors, errors = _fit(residual, [direction] if alone else [direction, change])
        size = direction.prod(dim=0).mean().clamp(min=0).sqrt().item()
        tests.append(_Told(hypothesis, value[0], size, factors[0], CERTAIN * errors[0]))
    return tests


def _judged(
    found: torch.Tensor,
    reference: Reference,
    noise: float | None,
    shares: dict[str, float | None],
    if_lost: str | None,
) -> _Judgement:
    effect = reference.effect
    if not effect or len(found) < ENOUGH:
        return _Judgement(CANNOT_TELL, TOO_FEW.format(len(found)) if effect else NO_CHANGE)
    limit, beside = limit_of(reference, noise), rms(found - reference.adapter[0])
    change, tests = found - reference.base[0], _told(found, reference)
    nearest = min(tests, key=lambda each: rms(found - each.value), default=None)
    explained = [each for each in tests if each.is_true and rms(found - each.value) < beside]
    is_named = nearest is not None and nearest in explained and beside > FLOOR * effect
    hypothesis = None if nearest is None else nearest.hypothesis
    if is_named and nearest is not None:
        is_named = rms(found - nearest.value) <= max(limit, PARTLY * beside)
    if if_lost is not None and (not is_named or hypothesis is None or hypothesis.name == EXPERTS):
        rounded = _rounded(change, reference.parts, shares, effect, if_lost)
        if rounded is not None:
            return rounded
    if is_named:
        return _named(hypothesis)
    known = {part: share for part, share in shares.items() if share is not None}
    if beside > limit:
        missing = {part: share for part, share in known.items() if share < 1 - PARTLY}
        if missing and rms(_rest(change, reference.parts)) < UNEXPLAINED * effect:
            return _Judgement(IN_PART, _listed(missing), is_share=True)
        reason = _unexplained(known, beside / effect)
        is_packed = if_lost is not None
        if noise is None and _may_be_applied(shares, is_packed):
            return _Judgement(CANNOT_TELL, f"{reason}; {UNPACKED if is_packed else WITH_BASE}")
        return _Judgement(OTHER, reason)
    smallest = (FLOOR if reference.is_exact else SMALL) * effect
    partly = [each for each in tests if each.is_partly_true and each.size >= smallest]
    if partly:
        return _in_part(max(partly, key=lambda each: each.least * each.size))
    unclear = [each for each in tests if not each.is_false and each.size >= SMALL * effect]
    if unclear:
        remedies = [MORE_TEXT] if reference.is_exact else [IN_FULL, MORE_TEXT]
        ranges = " and ".join(each.range for each in sorted(unclear, key=lambda each: -each.most)[:3])
        return _Judgement(CANNOT_TELL, TOO_LITTLE.format(f"{ranges} is", ", or ".join(remedies)))
    return _Judgement(APPLIED)


def _in_part(told: _Told) -> _Judgement:
    """Say how much of a hypothesis is true."""
    if told.hypothesis is None or told.factor < 0:
        of = "the change" if told.hypothesis is None else f"that by {told.hypothesis.name}"
        return _Judgement(IN_PART if told.factor > 0 else OTHER, f"{1 - told.factor:.0%} of {of}", is_share=True)
    kind, reason, _ = _named(told.hypothesis)
    return _Judgement(kind, f"about {min(told.factor, 1):.0%} of this: {reason}", is_share=True)


def _named(hypothesis: Hypothesis | None) -> _Judgement:
    if hypothesis is None:
        return _Judgement(NOT_APPLIED, "equals the base")
    hint = KNOWN.get(hypothesis.name)
    left_out = hypothesis.kind == LEFT_OUT
    reason = f"without {hypothesis.name}" if left_out else hypothesis.name
    return _Judgement(IN_PART if left_out else OTHER, f"{reason}: {hint}" if hint else reason)


def _rounded(
    change: torch.Tensor,
    parts: dict[str, torch.Tensor],
    shares: dict[str, float | None],
    effect: float,
    if_lost: str,
) -> _Judgement | None:
    """Say how much of the adapter's change is in packed weights; None where the texts do not tell, or it is more or so
    little of every part that something else may be there."""
    known = {part: share for part, share in shares.items() if share is not None}
    if len(known) < len(shares) or not known:
        return None
    noise, (part, least) = rms(_rest(change, parts)), min(known.items(), key=lambda each: each[1])
    most = max(known.values())
    is_other = least < PARTLY and most < 1 - PARTLY and noise > UNEXPLAINED * effect
    if most > 1 + PARTLY or is_other:
        return None
    there = f"{max(least, 0.0):.0%} of the change" + ("" if len(parts) == 1 else f" ({part})")
    reason = f"{ROUNDED}: {there} is there, beside noise {noise / effect:.2f} times as large as it"
    if least >= 1 - PARTLY:
        return _Judgement(APPLIED, reason)
    return _Judgement(NOT_APPLIED if max(known.values()) < NEAR else IN_PART, f"{reason}; {if_lost}")


def _may_be_applied(shares: dict[str, float | None], is_packed: bool) -> bool:
    """Tell whether the adapter may be there in full beside differences that are larger than the place's known noise.
    Rounding hides shares, or takes of them."""
    least = PARTLY if is_packed else 1 - PARTLY
    known = [share for share in shares.values() if share is not None]
    return (is_packed or len(known) == len(shares)) and all(least <= share <= 1 + PARTLY for share in known)


def _rest(change: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    factors, _ = _fit(change, list(parts.values()))
    return change - sum(factor * part[0] for factor, part in zip(factors, parts.values()))


def _listed(shares: dict[str, float]) -> str:
    return " and ".join(f"{share:.0%} of the change ({part})" for part, share in shares.items())


def _unexplained(shares: dict[str, float], beside: float) -> str:
    """Say what is there of the change; beside: how large other differences are, in the size of the adapter's."""
    there = f"{_listed(shares)}, beside " if shares else ""
    return (
        f"{there}other differences, {beside:.2g} times as large as the adapter's change: another adapter, base or "
        "quantization"
    )
