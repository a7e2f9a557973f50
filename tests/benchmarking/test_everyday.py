"""benchmarks/step/everyday.py at a tiny size."""

import csv
import sys

import pytest

from benchmarks.step import everyday

pytestmark = [pytest.mark.pinned, pytest.mark.slow]


def test_every_contender_trains_in_fixed_steps_and_in_the_field(monkeypatch, tmp_path):
    path = tmp_path / "a.csv"
    sizes = ["--device", "cpu", "--tiny", "--layers", "1", "--steps", "1", "--settings", "64", "field"]
    monkeypatch.setattr(sys, "argv", ["everyday.py", *sizes, "--experts", "bf16", "--csv", str(path)])
    everyday.main()
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "loss"]
    losses = {(row["contender"], row["shape"]): float(row["median"]) for row in rows}
    assert len(losses) == 2 * len(everyday.CONTENDERS)
    for setting in ("1,64", "1,field"):
        of_setting = [losses[contender, setting] for contender in everyday.CONTENDERS]
        assert of_setting == pytest.approx([of_setting[0]] * len(of_setting), abs=5e-3)  # bf16, after steps of AdamW
