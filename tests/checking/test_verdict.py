"""Verdicts on log-probabilities of which each part is known."""

import re

import pytest
import torch

from sonicmoe_hf.checkpoints.writing.rounding_effects import TO_NEAREST
from sonicmoe_hf.tools.checking.evidence import Evidence, Reference
from sonicmoe_hf.tools.checking.hypotheses import EXPERTS, LEFT_OUT, Hypothesis
from sonicmoe_hf.tools.checking.regression import Runs
from sonicmoe_hf.tools.checking.verdict import MIN_TOKENS
from sonicmoe_hf.tools.checking.verdict import judge as judge_evidence

pytestmark = pytest.mark.pinned
TOKENS = 1000


@pytest.fixture
def parts():
    """Draw the change by the experts, by the rest, and noise, each of size 1 for a token."""
    return torch.randn(3, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()


def twice(log_p):
    return Runs(log_p, log_p)


WITHOUT = Hypothesis(LEFT_OUT, EXPERTS, lambda layer: None)


def judge(log_p, reference, **known):
    return judge_evidence(Evidence(log_p, reference, **known))


def reference(experts, rest):
    return Reference(twice(torch.zeros_like(rest)), twice(experts + rest), [(WITHOUT, twice(rest))])


def test_rounding_that_takes_some_of_every_change_is_no_part_left_out(parts):
    """bf16 takes 3% off a change and adds noise. Where experts do little, in much the same direction as the rest, what it
    gives is nearer to the adapter without them, and not by chance."""
    experts, rest, noise = parts
    weak = 0.016 * (0.6 * rest + 0.8 * experts)
    assert "without" not in judge(0.97 * (rest + weak) + 0.075 * noise, reference(weak, rest)).reason
    assert judge(rest, reference(weak, rest)).reason.startswith("without its experts"), "in fp32 it can be told"


def test_the_rounding_of_the_trained_model_itself_is_no_part_that_is_missing(parts):
    """The adapter's and the hypothesis' own rounding looks like a part that is missing, however many tokens there are:
    unless there is a second run of each, a merge with every part is said to lack a quarter of the experts."""
    experts, rest, _ = parts
    noise = 0.7 * torch.randn(5, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    adapter = Runs(experts + 10 * rest + noise[0], experts + 10 * rest + noise[1])
    without, place = Runs(10 * rest + noise[2], 10 * rest + noise[3]), experts + 10 * rest + noise[4]
    zero = twice(torch.zeros(TOKENS, dtype=torch.float64))
    once = Reference(zero, twice(adapter.first), [(WITHOUT, twice(without.first))])
    assert judge(place, once, rounding_noise=1.5).kind == "applied in part"
    both = Reference(zero, adapter, [(WITHOUT, without)])
    verdict = judge(place, both, rounding_noise=1.5)
    assert verdict.kind == "applied" and verdict.shares["rest"] == pytest.approx(1, abs=0.05)
    first_zero, first_adapter, first_without = (
        Runs(*(each[:60] for each in runs)) for runs in (zero, adapter, without)
    )
    verdict = judge(place[:60], Reference(first_zero, first_adapter, [(WITHOUT, first_without)]), rounding_noise=1.5)
    assert verdict.kind == "cannot tell" and verdict.shares["experts"] is None
    assert "of its experts is there" in verdict.reason
    assert verdict.reason.endswith("add --dtype float32, or give longer text like that it was trained on, --text")
    assert judge(10 * rest + noise[4], both, rounding_noise=1.5).kind == "applied in part"


@pytest.mark.parametrize(
    ("missing", "noise", "kind", "words"),
    [
        (0.0, 0.2, "applied", ""),
        (0.2, 0.2, "applied in part", "about 2.% of this: without its experts"),
        (0.2, 1.2, "cannot tell", "between 6.% and 9.% of its experts is there"),
        (
            0.0,
            4.0,
            "cannot tell",
            "between 4.% and 15.% of its experts and between 7.% and 12.% of the change is there",
        ),
        (-0.3, 0.4, "other", "13.% of that by its experts"),
    ],
)
def test_a_fifth_of_a_part_that_is_missing_is_told_or_its_share_is_said_not_to_be_known(
    missing, noise, kind, words, parts
):
    experts, rest, random = parts
    found = (1 - missing) * experts + rest + noise * random
    verdict = judge(found, reference(experts, rest), rounding_noise=noise + 0.5)
    assert verdict.kind == kind and re.search(words, verdict.reason), verdict.reason


def test_a_part_whose_share_is_not_known_has_none(parts):
    experts, rest, noise = parts
    verdict = judge(0.01 * experts + rest + 0.2 * noise, reference(0.01 * experts, rest))
    assert verdict.kind == "applied", "it makes a hundredth of the change"
    assert verdict.shares["experts"] is None and verdict.shares["rest"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("tokens", "kind"), [(MIN_TOKENS - 1, "cannot tell"), (MIN_TOKENS, "applied")])
def test_few_tokens_get_no_verdict(tokens, kind, parts):
    experts, rest, _ = (part[:tokens] for part in parts)
    verdict = judge(experts + rest, reference(experts, rest))
    assert verdict.kind == kind and ("too few" in verdict.reason) == (kind == "cannot tell")


def test_other_differences_are_said_in_the_size_of_the_change(parts):
    experts, rest, noise = parts
    verdict = judge(experts + rest + 30 * noise, reference(experts, rest))
    assert verdict.kind == "other" and verdict.reason.startswith("other differences, 2")
    assert set(verdict.shares.values()) == {None}


@pytest.mark.parametrize(("left", "kind"), [(1.0, "cannot tell"), (0.5, "other")])
def test_a_server_of_unknown_noise_that_has_all_of_the_change_is_not_called_another(left, kind, parts):
    experts, rest, noise = parts
    verdict = judge(left * experts + rest + noise, reference(experts, rest))
    assert verdict.kind == kind and "other differences, 0." in verdict.reason
    assert ("let the server have the base beside the adapter" in verdict.reason) == (left == 1)
    verdict = judge(left * experts + rest + noise, reference(experts, rest), rounding_noise=1.0)
    assert verdict.kind == ("applied" if left == 1 else "applied in part"), "the base tells how large its noise is"


@pytest.mark.parametrize(
    ("experts_left", "rest_left", "noise", "tokens", "kind", "words"),
    [
        (1.0, 1.0, 4.0, 200, "cannot tell", "check what merge writes without --quantize"),
        (0.1, 0.95, 1.0, TOKENS, "applied in part", "9% of the change (experts) is there, beside noise 0.70"),
        (0.1, 0.1, 1.0, TOKENS, "other", "another adapter, base or quantization"),
    ],
)
def test_noise_of_packed_weights_that_hides_the_change_is_not_called_another_adapter(
    experts_left, rest_left, noise, tokens, kind, words, parts
):
    """A small adapter that is merged with --quantize keep: the dither is several times its change."""
    experts, rest, random = (part[:tokens] for part in parts)
    found = experts_left * experts + rest_left * rest + noise * random
    verdict = judge(found, reference(experts, rest), rounding_remedy=TO_NEAREST)
    assert verdict.kind == kind and words in verdict.reason
    if kind == "cannot tell":
        assert judge(experts + rest, reference(experts, rest)).kind == "applied", "merged without --quantize"


@pytest.mark.parametrize(
    ("left", "noise", "kind", "words"),
    [
        (0.95, 0.8, "applied", "merged and rounded: 9"),
        (0.2, 0.3, "applied in part", "of the change (experts) is there"),
        (
            0.0,
            0.0,
            "applied in part",
            "merged and rounded: 0% of the change (experts) is there, beside noise 0.00 times",
        ),
        (2.0, 0.3, "other", "200% of the change (experts)"),
    ],
)
def test_how_much_of_a_change_rounding_left_in_packed_experts_is_said(left, noise, kind, words, parts):
    experts, rest, random = parts
    verdict = judge(left * experts + rest + noise * random, reference(experts, rest), rounding_remedy=TO_NEAREST)
    assert verdict.kind == kind and words in verdict.reason
    assert ("--rounding dithered" in verdict.reason) == (kind == "applied in part")


def test_a_merge_that_rounding_undid_is_told_from_another_adapter(parts):
    experts, rest, noise = parts
    all_packed = Reference(twice(torch.zeros_like(experts)), twice(experts), [])
    lost = judge(0 * experts, all_packed, rounding_remedy=TO_NEAREST)
    assert lost.kind == "not applied" and "0% of the change is there, beside noise 0.00 times" in lost.reason
    assert judge(rest, all_packed, rounding_remedy=TO_NEAREST).kind == "other"
    a_fifth = judge(0.2 * experts + 0.2 * noise, all_packed, rounding_remedy=TO_NEAREST)
    assert a_fifth.kind == "applied in part" and a_fifth.reason.startswith("merged and rounded: 2")
