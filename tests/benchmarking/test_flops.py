"""benchmarks/step/flops.py: model FLOPs counted by hand, and the CSVs' own rows."""

import pytest

from benchmarks.common.command import RESULTS
from benchmarks.common.table import read_rows
from benchmarks.step.flops import add_flops, flops_of_token

pytestmark = pytest.mark.pinned


def test_the_flops_of_a_token_are_those_counted_by_hand():
    hidden, heads, kv, head, inner, experts, top_k, vocabulary = 2048, 32, 4, 128, 768, 128, 8, 151936  # Qwen3-30B-A3B
    attention = hidden * head * (2 * heads + 2 * kv)
    layer = attention + hidden * experts + top_k * 3 * hidden * inner
    met = 2 * layer + hidden * vocabulary
    scores = 2 * 2 * (2 * heads * head) * 4096 // 2  # two layers; half of the sequence on average
    assert flops_of_token("Qwen3-30B-A3B", 2, 4096, "full") == 6 * met + 3 * scores
    rank = 16
    q_and_v = rank * (hidden + heads * head + hidden + kv * head)
    adapters = 2 * (q_and_v + rank * top_k * (hidden + 2 * inner + inner + hidden))
    assert flops_of_token("Qwen3-30B-A3B", 2, 4096, "LoRA") == 4 * met + 6 * adapters + 3 * scores


@pytest.mark.parametrize("name", ["train_step_four.csv", "long.csv"])
def test_the_rows_of_flops_follow_from_those_of_tokens(name):
    rows = read_rows(RESULTS / name)
    assert [row for row in rows if row["metric"] == "tflops"]
    assert add_flops(rows) == rows
