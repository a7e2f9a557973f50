"""Verdict: which hypothesis of what became of an adapter explains the log-probabilities that a place gives.

Letters: T tokens. All vectors hold a token's log-probability, less that of the likeliest token where all that a place
gives is its first choices. `observed` are those of the place, the others those of the trained model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hypotheses import EXPERTS, LEFT_OUT, REMEDIES, Hypothesis
from .hypothesis_tests import CLEAR_LACK, USUAL_LACK, HypothesisTest, Reference, run_tests
from .regression import Runs, fit, residual_of, rms

APPLIED, NOT_APPLIED, IN_PART, OTHER = "applied", "not applied", "applied in part", "other"
CANNOT_TELL = "cannot tell"
MIN_TOKENS = 30  # with fewer, a standard deviation is not known well enough to test hypotheses by it
FP32_FLOOR = 1e-4  # of the adapter's change: in fp32 another order of summation makes differences of a few 1e-6 of it
# In bf16, as measured in places that do apply the adapter (benchmarks.quality.check_defects):
MAX_NOISE_RATIO = 2.0  # these places differ by 0.63 to 1.05 times the noise, which is known by one draw
MIN_TELLABLE = 0.05  # of the adapter's change: a part with a smaller effect on these texts may hide in the noise
MAX_UNEXPLAINED = 0.5  # of the adapter's change: more must be something else, where the place's noise is not known
ROUNDED = "merged and rounded"
NO_CHANGE = "the adapter itself changes nothing: its lora_B is zero, or lost in the rounding of --dtype"
TOO_FEW = "{} tokens are too few to tell, give a longer --text"
TOO_LITTLE = "{} there; what the adapter changes of these texts is too little to tell more beside rounding: {}"
IN_FULL = "add --dtype float32"
MORE_TEXT = "give longer text like that it was trained on, --text"
UNPACKED = f"{MORE_TEXT}, or check what merge writes without --quantize"
WITH_BASE = "let the server have the base beside the adapter, which is then compared too"


class Verdict(NamedTuple):
    """The verdict on a place.

    kind: APPLIED, NOT_APPLIED, IN_PART, OTHER or CANNOT_TELL. reason: a sentence, or "". from_adapter, from_base: mean
    |difference| of a token. shares: of each part of the adapter's change how much is there, 1 for all of it; None where
    the texts leave it open. may_be_scaled: whether the adapter at another scale might explain what was observed.
    """

    kind: str
    reason: str
    from_adapter: float
    from_base: float
    shares: dict[str, float | None]
    may_be_scaled: bool


class _Judgement(NamedTuple):
    """Kind and reason of a verdict. is_share: whether the reason says how much of the change is there, rather than names
    a hypothesis."""

    kind: str
    reason: str = ""
    is_share: bool = False


def judge(
    observed: torch.Tensor,
    reference: Reference,
    own_base: torch.Tensor | None = None,
    noise: float | None = None,
    rounding_remedy: str | None = None,
) -> Verdict:
    """Judge a place by its log-probabilities [T].

    own_base: those of the place without the adapter, if they are known for the same tokens. Its differences from the
    reference's base, such as those of its dtype, are then subtracted, and are the noise. noise: rms of a token's
    difference that the place's rounding makes; None where it is not known, as of packed weights. rounding_remedy: the
    remedy of a checkpoint of packed weights, in which rounding may have dropped a part of the change, or hides it in
    noise; None of others.
    """
    measured, noise = beside_base(observed, reference, own_base, noise)
    shares = _shares(measured - reference.base.first, reference)
    kind, reason, is_share = _judge(measured, reference, noise, shares, rounding_remedy)
    from_adapter, from_base = (
        (observed - other).abs().mean().item() for other in (reference.adapter.first, reference.base.first)
    )
    return Verdict(kind, reason, from_adapter, from_base, shares, kind == OTHER or is_share)


def beside_base(
    observed: torch.Tensor, reference: Reference, own_base: torch.Tensor | None, noise: float | None
) -> tuple[torch.Tensor, float | None]:
    """Subtract the differences of a place's own base from the reference's, and count them as noise; see `judge`."""
    if own_base is None or rms(own_base - reference.adapter.first) < rms(own_base - reference.base.first):
        return observed, noise  # without own_base, or where that has the adapter too
    return observed - own_base + reference.base.first, max(noise or 0.0, rms(own_base - reference.base.first))


def limit_of(reference: Reference, noise: float | None) -> float:
    """Compute the rms difference from the expected change up to which a place counts as applied."""
    return (
        MAX_UNEXPLAINED * reference.effect
        if noise is None
        else MAX_NOISE_RATIO * noise + FP32_FLOOR * reference.effect
    )


def _shares(change: torch.Tensor, reference: Reference) -> dict[str, float | None]:
    """Fit `change` [T] by a sum of shares of the parts; a share with a large error is None."""
    if not (parts := reference.parts):
        return {}
    shares, errors = fit(change, list(parts.values()))
    return {part: share if error <= CLEAR_LACK / 2 else None for part, share, error in zip(parts, shares, errors)}


def _judge(
    observed: torch.Tensor,
    reference: Reference,
    noise: float | None,
    shares: dict[str, float | None],
    rounding_remedy: str | None,
) -> _Judgement:
    """Judge in this order: too little to judge by; a hypothesis that is nearer than the adapter; packed weights, which
    rounding explains; a change of which clearly much is missing; a hypothesis that is true in part; the adapter."""
    effect = reference.effect
    if not effect or len(observed) < MIN_TOKENS:
        return _Judgement(CANNOT_TELL, TOO_FEW.format(len(observed)) if effect else NO_CHANGE)
    limit, from_adapter = limit_of(reference, noise), rms(observed - reference.adapter.first)
    change, tests = observed - reference.base.first, run_tests(observed, reference)
    explanation = _find_explanation(observed, tests, reference, limit)
    may_be_rounding = explanation is None or explanation.hypothesis is None or explanation.hypothesis.name == EXPERTS
    if rounding_remedy is not None and may_be_rounding:
        rounded = _judge_rounded(change, reference.parts, shares, effect, rounding_remedy)
        if rounded is not None:
            return rounded
    if explanation is not None:
        return _judge_named(explanation.hypothesis)
    if from_adapter > limit:
        is_packed = rounding_remedy is not None
        return _judge_far(change, reference, shares, from_adapter, knows_noise=noise is not None, is_packed=is_packed)
    return _judge_near(tests, reference)


def _find_explanation(
    observed: torch.Tensor, tests: list[HypothesisTest], reference: Reference, limit: float
) -> HypothesisTest | None:
    """Find the test that explains the place in the adapter's stead: the one whose hypothesis, or the base, is nearest to
    what was observed, if it is true, nearer than the adapter, and so near that nothing else need be there.

        base              without the experts       observed                              adapter
         |                         |<--- distance --->|<----------- from_adapter ----------->|

    Here the place lacks the experts' part if `distance`, in rms, is at most `limit` or CLEAR_LACK of `from_adapter`.
    """
    nearest = min(tests, key=lambda each: rms(observed - each.log_p), default=None)
    if nearest is None or not nearest.is_true:
        return None
    distance, from_adapter = rms(observed - nearest.log_p), rms(observed - reference.adapter.first)
    is_nearer = distance < from_adapter and from_adapter > FP32_FLOOR * reference.effect
    return nearest if is_nearer and distance <= max(limit, CLEAR_LACK * from_adapter) else None


def _judge_far(
    change: torch.Tensor,
    reference: Reference,
    shares: dict[str, float | None],
    from_adapter: float,
    knows_noise: bool,
    is_packed: bool,
) -> _Judgement:
    """Judge a place that differs from the adapter by more than its rounding, and that no hypothesis explains."""
    effect = reference.effect
    known = {part: share for part, share in shares.items() if share is not None}
    missing = {part: share for part, share in known.items() if share < 1 - CLEAR_LACK}
    if missing and rms(residual_of(change, list(reference.parts.values()))) < MAX_UNEXPLAINED * effect:
        return _Judgement(IN_PART, _describe_shares(missing), is_share=True)
    reason = _describe_rest(known, from_adapter / effect)
    if not knows_noise and _may_be_applied(shares, is_packed):
        return _Judgement(CANNOT_TELL, f"{reason}; {UNPACKED if is_packed else WITH_BASE}")
    return _Judgement(OTHER, reason)


def _judge_near(tests: list[HypothesisTest], reference: Reference) -> _Judgement:
    """Judge a place that is as near to the adapter as its rounding: a hypothesis may still be true in part."""
    effect = reference.effect
    smallest = (FP32_FLOOR if reference.adapter.is_exact else MIN_TELLABLE) * effect
    partly = [each for each in tests if each.is_partly_true and each.size >= smallest]
    if partly:
        return _judge_partly(max(partly, key=lambda each: each.min_coefficient * each.size))
    unclear = [each for each in tests if not each.is_false and each.size >= MIN_TELLABLE * effect]
    if unclear:
        remedies = [MORE_TEXT] if reference.adapter.is_exact else [IN_FULL, MORE_TEXT]
        unclear.sort(key=lambda each: -each.max_coefficient)
        ranges = " and ".join(_describe_range(each) for each in unclear[:3])
        return _Judgement(CANNOT_TELL, TOO_LITTLE.format(f"{ranges} is", ", or ".join(remedies)))
    return _Judgement(APPLIED)


def _judge_partly(test: HypothesisTest) -> _Judgement:
    """Judge a place at which a hypothesis is true in part."""
    if test.hypothesis is None or test.coefficient < 0:
        of = "the change" if test.hypothesis is None else f"that by {test.hypothesis.name}"
        kind = IN_PART if test.coefficient > 0 else OTHER
        return _Judgement(kind, f"{1 - test.coefficient:.0%} of {of}", is_share=True)
    kind, reason, _ = _judge_named(test.hypothesis)
    return _Judgement(kind, f"about {min(test.coefficient, 1):.0%} of this: {reason}", is_share=True)


def _judge_named(hypothesis: Hypothesis | None) -> _Judgement:
    if hypothesis is None:
        return _Judgement(NOT_APPLIED, "equals the base")
    hint = REMEDIES.get(hypothesis.name)
    left_out = hypothesis.kind == LEFT_OUT
    reason = f"without {hypothesis.name}" if left_out else hypothesis.name
    return _Judgement(IN_PART if left_out else OTHER, f"{reason}: {hint}" if hint else reason)


def _judge_rounded(
    change: torch.Tensor,
    parts: dict[str, Runs],
    shares: dict[str, float | None],
    effect: float,
    rounding_remedy: str,
) -> _Judgement | None:
    """Judge packed weights by how much of the adapter's change they have; None where the texts leave that open, or it is
    too much, or so little of every part that something else may be there."""
    known = {part: share for part, share in shares.items() if share is not None}
    if len(known) < len(shares) or not known:
        return None
    noise = rms(residual_of(change, list(parts.values())))
    (part, min_share), max_share = min(known.items(), key=lambda each: each[1]), max(known.values())
    is_other = min_share < CLEAR_LACK and max_share < 1 - CLEAR_LACK and noise > MAX_UNEXPLAINED * effect
    if max_share > 1 + CLEAR_LACK or is_other:
        return None
    present = f"{max(min_share, 0.0):.0%} of the change" + ("" if len(parts) == 1 else f" ({part})")
    reason = f"{ROUNDED}: {present} is there, beside noise {noise / effect:.2f} times as large as it"
    if min_share >= 1 - CLEAR_LACK:
        return _Judgement(APPLIED, reason)
    return _Judgement(NOT_APPLIED if max_share < USUAL_LACK else IN_PART, f"{reason}; {rounding_remedy}")


def _may_be_applied(shares: dict[str, float | None], is_packed: bool) -> bool:
    """Tell whether the adapter may be there in full, beside differences that are larger than the place's known noise. In
    packed weights rounding hides some shares and lowers others."""
    min_share = CLEAR_LACK if is_packed else 1 - CLEAR_LACK
    known = [share for share in shares.values() if share is not None]
    return (is_packed or len(known) == len(shares)) and all(min_share <= share <= 1 + CLEAR_LACK for share in known)


def _describe_range(test: HypothesisTest) -> str:
    """Describe how much is there of the change that the hypothesis leaves out."""
    if test.hypothesis is not None and test.is_of_misreading:
        return f"up to {test.max_coefficient:.0%} of this, {test.hypothesis.name},"
    name = "the change" if test.hypothesis is None else test.hypothesis.name
    share = 1 - test.coefficient
    return f"between {max(share - test.error, 0):.0%} and {share + test.error:.0%} of {name}"


def _describe_shares(shares: dict[str, float]) -> str:
    return " and ".join(f"{share:.0%} of the change ({part})" for part, share in shares.items())


def _describe_rest(shares: dict[str, float], beside: float) -> str:
    """Describe what is there of the change, beside other differences that are `beside` times as large as the
    adapter's."""
    there = f"{_describe_shares(shares)}, beside " if shares else ""
    return (
        f"{there}other differences, {beside:.2g} times as large as the adapter's change: another adapter, base or "
        "quantization"
    )
