"""benchmarks/quality/lora_rank.py in one step: what its contenders are."""

import csv
import sys
from unittest import mock

import pytest

from benchmarks.quality import lora_rank

pytestmark = [pytest.mark.pinned, pytest.mark.slow]


def test_contenders_start_alike_and_differ_in_the_experts_rank(tmp_path):
    sizes = {"--start-steps": 1, "--steps": 1, "--seeds": 1, "--held-out": 2, "--csv": tmp_path / "lora_rank.csv"}
    arguments = [str(word) for pair in sizes.items() for word in pair]
    with mock.patch.object(sys, "argv", ["lora_rank.py", *arguments]):
        lora_rank.main()
    with (tmp_path / "lora_rank.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], row["step"]) for row in rows] == [
        (contender, step) for contender in ("r", "r / K", "attention alone") for step in ("0", "1")
    ]
    assert len({row["held_out_loss"] for row in rows if row["step"] == "0"}) == 1, "B is zero"
    parameters = {row["contender"]: int(row["adapter_parameters"]) for row in rows}
    attention = parameters["attention alone"]
    assert parameters["r"] - attention == 4 * (parameters["r / K"] - attention) > 0
