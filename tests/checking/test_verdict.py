"""Verdicts on log-probabilities of which each part is known."""

import pytest
import torch

from sonicmoe_hf.tools.checking.hypotheses import EXPERTS, LEFT_OUT, Hypothesis
from sonicmoe_hf.tools.checking.verdict import ENOUGH, Reference, judge

pytestmark = pytest.mark.pinned
TOKENS = 1000


@pytest.fixture
def parts():
    """Draw the change by the experts, by the rest, and noise, each of size 1 for a token."""
    return torch.randn(3, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()


def reference(experts, rest):
    without = Hypothesis(LEFT_OUT, EXPERTS, lambda layer: None)
    return Reference(torch.zeros(len(rest)), experts + rest, [(without, rest)])


def test_rounding_that_takes_some_of_every_change_is_no_part_left_out(parts):
    """bf16 takes 3% off a change and adds noise. Where experts do little, in much the same direction as the rest, what it
    gives is nearer to the adapter without them, and not by chance."""
    experts, rest, noise = parts
    weak = 0.016 * (0.6 * rest + 0.8 * experts)
    assert "without" not in judge(0.97 * (rest + weak) + 0.075 * noise, reference(weak, rest)).reason
    assert judge(rest, reference(weak, rest)).reason.startswith("without its experts"), "in fp32 it can be told"


def test_what_is_smaller_than_the_rounding_of_the_trained_model_itself_is_not_told(parts):
    """The adapter's and the hypothesis' own rounding looks like a part that is missing, however many tokens there are:
    unless it is counted in, a merge with every part is said to lack two fifths of the experts."""
    experts, rest, noise = parts
    without = Hypothesis(LEFT_OUT, EXPERTS, lambda layer: None)
    seen = [torch.zeros(TOKENS), experts + 10 * rest + noise, [(without, 10 * rest + noise.roll(1))]]
    merged = experts + 10 * rest + noise.roll(2)
    assert judge(merged, Reference(*seen), noise=1.5).kind == "applied in part"
    verdict = judge(merged, Reference(*seen, noise=1.5), noise=1.5)
    assert verdict.kind == "cannot tell" and "(experts)" in verdict.reason and "--dtype float32" in verdict.reason
    assert verdict.shares["experts"] is None and verdict.shares["rest"] == pytest.approx(1, abs=0.05)
    assert judge(seen[1], Reference(*seen, noise=1.5), noise=1.5).kind == "applied", "which has the same rounding"
    lost = judge(experts + noise.roll(2), Reference(*seen, noise=1.5), noise=1.5)
    assert lost.kind != "applied" and lost.shares["rest"] < 0.1, "what is large is told all the same"


def test_a_part_whose_share_is_not_known_has_none(parts):
    experts, rest, noise = parts
    verdict = judge(0.01 * experts + rest + 0.2 * noise, reference(0.01 * experts, rest))
    assert verdict.kind == "cannot tell" and "(experts) is too little to tell" in verdict.reason
    assert verdict.shares["experts"] is None and verdict.shares["rest"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("tokens", "kind"), [(ENOUGH - 1, "cannot tell"), (ENOUGH, "applied")])
def test_few_tokens_get_no_verdict(tokens, kind, parts):
    experts, rest, _ = (part[:tokens] for part in parts)
    verdict = judge(experts + rest, reference(experts, rest))
    assert verdict.kind == kind and ("too few" in verdict.reason) == (kind == "cannot tell")


def test_other_differences_are_said_in_the_size_of_the_change(parts):
    experts, rest, noise = parts
    verdict = judge(experts + rest + 30 * noise, reference(experts, rest))
    assert verdict.kind == "other" and verdict.reason.startswith("other differences, 2")
    assert set(verdict.shares.values()) == {None}


@pytest.mark.parametrize(
    ("left", "noise", "kind", "words"),
    [
        (0.95, 0.8, "applied", "merged and rounded: 9"),
        (0.2, 0.3, "applied in part", "of the change (experts) is there"),
        (
            0.0,
            0.0,
            "applied in part",
            "merged and rounded: 0% of the change (experts) is there, beside noise 0.0 times",
        ),
        (2.0, 0.3, "other", "200% of the change (experts)"),
    ],
)
def test_how_much_of_a_change_rounding_left_in_packed_experts_is_said(left, noise, kind, words, parts):
    experts, rest, random = parts
    verdict = judge(left * experts + rest + noise * random, reference(experts, rest), is_rounded=True)
    assert verdict.kind == kind and words in verdict.reason
    assert ("--rounding dithered" in verdict.reason) == (kind == "applied in part")


def test_a_merge_that_rounding_undid_is_told_from_another_adapter(parts):
    experts, rest, noise = parts
    all_packed = Reference(torch.zeros(TOKENS), experts, [])
    lost = judge(0 * experts, all_packed, is_rounded=True)
    assert lost.kind == "not applied" and "0% of the change is there, beside noise 0.0 times" in lost.reason
    assert judge(rest, all_packed, is_rounded=True).kind == "other"
    a_fifth = judge(0.2 * experts + 0.2 * noise, all_packed, is_rounded=True)
    assert a_fifth.kind == "applied in part" and a_fifth.reason.startswith("merged and rounded: 2")
