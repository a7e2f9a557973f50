"""`check` says "applied" of no adapter that a merge has damaged: the cases that it once believed, and defects drawn at random."""

import random

import pytest

from benchmarks.quality.check_defects import KINDS, NONE, SIZES, Defect, draw, measure, word_tokenizer, write_text

pytestmark = pytest.mark.pinned


def of_layer(number, experts_alone=False):
    return lambda layer: 0.0 if layer.number == number and (layer.experts or not experts_alone) else None


CASES = [  # and the words of the reason in fp32
    (Defect("the last layer", 1, of_layer("3")), "without layer 3"),
    (Defect("layer 2's experts", 1, of_layer("2", experts_alone=True)), "without layer 2's experts"),
    (Defect("half of down", 1, lambda layer: 0.5 if layer.target == "down_proj" else None), "down_proj scaled by 0.5"),
    (Defect("1.2", 1, lambda layer: 1.2), "the adapter scaled by 1.2"),
    (Defect("0.8", 1, lambda layer: 0.8), "the adapter scaled by 0.8"),
    (Defect("0.5", 1, lambda layer: 0.5), "the adapter scaled by 0.5"),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_what_is_missing_is_told_and_named(dtype, tmp_path):
    text = write_text(tmp_path / "text", 1100, random.Random(0))
    cases = [(NONE, ""), *CASES]
    verdicts = measure(tmp_path, word_tokenizer(), text, dtype, [defect for defect, _ in cases])
    assert verdicts[0][0] == "applied"
    for (defect, words), (kind, reason) in zip(cases[1:], verdicts[1:]):
        assert kind not in ("applied", "cannot tell"), defect.kind
        assert dtype == "bfloat16" or words in reason, reason


def test_what_is_trained_whole_and_missing_is_named(tmp_path):
    text = write_text(tmp_path / "text", 1100, random.Random(0))
    without = {
        "lm_head": Defect("lm_head", 1, lambda layer: None, "lm_head"),
        "norm": Defect("norm", 1, lambda layer: None, "norm"),
        "its LoRA": Defect("LoRA", 1, lambda layer: 0.0),
    }
    applied, *verdicts = measure(tmp_path, word_tokenizer(), text, "float32", [NONE, *without.values()])
    assert applied[0] == "applied"
    assert verdicts == [("applied in part", f"without {name}") for name in without]


def test_no_defect_drawn_at_random_is_applied_in_fp32(tmp_path):
    draws = random.Random(4)
    text = write_text(tmp_path / "text", 500, draws)
    defects = [draw(kind, draws.choice(SIZES), draws) for kind in draws.sample(KINDS, 4)]
    assert all(kind != "applied" for kind, _ in measure(tmp_path, word_tokenizer(), text, "float32", defects))
