"""Verdict: which hypothesis of what became of an adapter explains the log-probabilities that a place gives."""

from __future__ import annotations

from typing import NamedTuple

from .evidence import CLEAR_LACK, FP32_FLOOR, MAX_UNEXPLAINED, USUAL_LACK, Evidence
from .hypotheses import EXPERTS, LEFT_OUT, REMEDIES, THE_BASE, Hypothesis
from .hypothesis_tests import HypothesisTest, run_tests

APPLIED, NOT_APPLIED, IN_PART, OTHER = "applied", "not applied", "applied in part", "other"
CANNOT_TELL = "cannot tell"
MIN_TOKENS = 30  # with fewer, a standard deviation is not known well enough to test hypotheses by it
MIN_TELLABLE = 0.05  # of the adapter's change: in bf16 a part with a smaller effect may hide in the noise
ROUNDED = "merged and rounded"
NO_CHANGE = "the adapter itself changes nothing: its lora_B is zero, or lost in the rounding of --dtype"
TOO_FEW = "{} tokens are too few to tell, give a longer --text"
TOO_LITTLE = "{} there; what the adapter changes of these texts is too little to tell more beside rounding: {}"
IN_FP32 = "add --dtype float32"
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


def judge(evidence: Evidence) -> Verdict:
    """Judge a place by the evidence on it."""
    kind, reason, is_share = _judge(evidence)
    from_adapter, from_base = (
        (evidence.log_p - runs.first).abs().mean().item()
        for runs in (evidence.reference.adapter, evidence.reference.base)
    )
    return Verdict(kind, reason, from_adapter, from_base, evidence.shares, kind == OTHER or is_share)


def _judge(evidence: Evidence) -> _Judgement:
    """Judge in this order: too little to judge by; of packed weights what rounding explains, also where the base or the
    lack of the experts would; a hypothesis that is nearer than the adapter; a change of which clearly much is missing; a
    hypothesis that is true in part; the adapter."""
    if not evidence.reference.effect:
        return _Judgement(CANNOT_TELL, NO_CHANGE)
    if (num_tokens := len(evidence.log_p)) < MIN_TOKENS:
        return _Judgement(CANNOT_TELL, TOO_FEW.format(num_tokens))
    tests = run_tests(evidence)
    explanation = _find_explanation(evidence, tests)
    if evidence.is_packed and (explanation is None or explanation.hypothesis.name in (THE_BASE.name, EXPERTS)):
        by_rounding = _judge_rounded(evidence)
        if by_rounding is not None:
            return by_rounding
    if explanation is not None:
        return _judge_named(explanation.hypothesis)
    return _judge_near(evidence, tests) if evidence.rms_from_adapter <= evidence.limit else _judge_far(evidence)


def _find_explanation(evidence: Evidence, tests: list[HypothesisTest]) -> HypothesisTest | None:
    """Find the test that explains the place in the adapter's stead: the one whose hypothesis, or the base, is nearest to
    what was observed, if it is true, nearer than the adapter, and so near that nothing else need be there.

        base              without the experts       observed                              adapter
         |                         |<--- distance --->|<----------- from_adapter ----------->|

    Here the place lacks the experts' part if `distance`, in rms, is at most the limit or CLEAR_LACK of `from_adapter`.
    """
    nearest = min(tests, key=lambda each: evidence.rms_from(each.log_p), default=None)
    if nearest is None or not nearest.is_true:
        return None
    distance, from_adapter = evidence.rms_from(nearest.log_p), evidence.rms_from_adapter
    is_nearer = distance < from_adapter and from_adapter > FP32_FLOOR * evidence.reference.effect
    return nearest if is_nearer and evidence.is_explained_by(nearest.log_p) else None


def _judge_far(evidence: Evidence) -> _Judgement:
    """Judge a place that differs from the adapter by more than its rounding, and that no hypothesis explains."""
    effect, known = evidence.reference.effect, evidence.known_shares
    missing = {part: share for part, share in known.items() if share < 1 - CLEAR_LACK}
    if missing and evidence.unexplained < MAX_UNEXPLAINED * effect:
        return _Judgement(IN_PART, _describe_shares(missing), is_share=True)
    reason = _describe_rest(known, evidence.rms_from_adapter / effect)
    if evidence.noise is None and _may_be_applied(evidence):
        return _Judgement(CANNOT_TELL, f"{reason}; {UNPACKED if evidence.is_packed else WITH_BASE}")
    return _Judgement(OTHER, reason)


def _judge_near(evidence: Evidence, tests: list[HypothesisTest]) -> _Judgement:
    """Judge a place that is as near to the adapter as its rounding: a hypothesis may still be true in part."""
    effect, is_exact = evidence.reference.effect, evidence.reference.adapter.is_exact
    smallest = (FP32_FLOOR if is_exact else MIN_TELLABLE) * effect
    partly = [each for each in tests if each.is_partly_true and each.size >= smallest]
    if partly:
        return _judge_partly(max(partly, key=lambda each: each.min_coefficient * each.size))
    unclear = [each for each in tests if not each.is_false and each.size >= MIN_TELLABLE * effect]
    if unclear:
        remedies = [MORE_TEXT] if is_exact else [IN_FP32, MORE_TEXT]
        unclear.sort(key=lambda each: -each.max_coefficient)
        ranges = " and ".join(_describe_range(each) for each in unclear[:3])
        return _Judgement(CANNOT_TELL, TOO_LITTLE.format(f"{ranges} is", ", or ".join(remedies)))
    return _Judgement(APPLIED)


def _judge_partly(test: HypothesisTest) -> _Judgement:
    """Judge a place at which a hypothesis is true in part."""
    is_of_base = test.hypothesis is THE_BASE
    if is_of_base or test.coefficient < 0:
        name = "the change" if is_of_base else f"that by {test.hypothesis.name}"
        kind = IN_PART if test.coefficient > 0 else OTHER
        return _Judgement(kind, f"{1 - test.coefficient:.0%} of {name}", is_share=True)
    kind, reason, _ = _judge_named(test.hypothesis)
    return _Judgement(kind, f"about {min(test.coefficient, 1):.0%} of this: {reason}", is_share=True)


def _judge_named(hypothesis: Hypothesis) -> _Judgement:
    """Judge a place that a hypothesis explains."""
    if hypothesis is THE_BASE:
        return _Judgement(NOT_APPLIED, "equals the base")
    hint = REMEDIES.get(hypothesis.name)
    left_out = hypothesis.kind == LEFT_OUT
    reason = f"without {hypothesis.name}" if left_out else hypothesis.name
    return _Judgement(IN_PART if left_out else OTHER, f"{reason}: {hint}" if hint else reason)


def _judge_rounded(evidence: Evidence) -> _Judgement | None:
    """Judge packed weights by how much of the adapter's change they have; None where the texts leave that open, or it is
    too much, or so little of every part that something else may be there."""
    shares, effect = evidence.known_shares, evidence.reference.effect
    if len(shares) < len(evidence.shares) or not shares:
        return None
    (part, min_share), max_share = min(shares.items(), key=lambda each: each[1]), max(shares.values())
    is_little = min_share < CLEAR_LACK and max_share < 1 - CLEAR_LACK
    noise = evidence.unexplained
    if max_share > 1 + CLEAR_LACK or (is_little and noise > MAX_UNEXPLAINED * effect):
        return None
    present = f"{max(min_share, 0.0):.0%} of the change" + ("" if len(shares) == 1 else f" ({part})")
    reason = f"{ROUNDED}: {present} is there, beside noise {noise / effect:.2f} times as large as it"
    if min_share >= 1 - CLEAR_LACK:
        return _Judgement(APPLIED, reason)
    kind = NOT_APPLIED if max_share < USUAL_LACK else IN_PART
    return _Judgement(kind, f"{reason}; {evidence.rounding_remedy}")


def _may_be_applied(evidence: Evidence) -> bool:
    """Tell whether the adapter may be there in full, beside differences that are larger than the place's known noise. In
    packed weights rounding hides some shares and lowers others."""
    is_packed, shares = evidence.is_packed, evidence.known_shares
    min_share = CLEAR_LACK if is_packed else 1 - CLEAR_LACK
    knows_enough = is_packed or len(shares) == len(evidence.shares)
    return knows_enough and all(min_share <= share <= 1 + CLEAR_LACK for share in shares.values())


def _describe_range(test: HypothesisTest) -> str:
    """Describe how much is there of the change that the hypothesis leaves out."""
    if test.is_of_misreading:
        return f"up to {test.max_coefficient:.0%} of this, {test.hypothesis.name},"
    name = "the change" if test.hypothesis is THE_BASE else test.hypothesis.name
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
