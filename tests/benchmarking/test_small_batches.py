"""benchmarks/step/small_batches.py at a tiny size."""

import csv
import sys

import pytest

from benchmarks.step import small_batches

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

TINY = ("--device", "cpu", "--tiny", "--tokens", "64", "--layers", "1", "--steps", "2", "--contender", "sonicmoe-hf")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["small_batches.py", *TINY, *arguments])
    small_batches.main()


def test_compiled_steps_go_on_training(monkeypatch, tmp_path):
    path = tmp_path / "a.csv"
    run(monkeypatch, "--csv", str(path))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    losses = {row["launch"]: float(row["median"]) for row in rows if row["metric"] == "loss"}
    assert list(losses) == list(small_batches.EXECUTIONS)
    # each execution goes on with the weights that the one before left, on the same tokens
    assert 4.2 > losses["eager"] > losses["layers"] > losses["reduce-overhead"] > 0
    assert {row["median"] for row in rows if row["metric"] == "graph_breaks"} == {"0"}


def test_rows_of_other_runs_stay_and_those_of_the_same_are_replaced(monkeypatch, tmp_path):
    path = tmp_path / "a.csv"
    for tokens in ("64", "32", "64"):
        run(monkeypatch, "--csv", str(path), "--execution", "eager", "--tokens", tokens)
    with open(path, newline="") as file:
        assert sorted(row["shape"] for row in csv.DictReader(file) if row["metric"] == "ms") == ["1,32", "1,64"]


def test_contenders_in_turn(monkeypatch, tmp_path):
    path = tmp_path / "a.csv"
    run(monkeypatch, "--in-turn", "--contender", "grouped_mm", "--execution", "eager", "--csv", str(path))
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["contender"], row["launch"], row["metric"]) for row in rows] == [
        (contender, "eager, in turn", metric)
        for contender in ("sonicmoe-hf", "grouped_mm")
        for metric in ("ms", "issue_ms")
    ]
    issued, ended = (
        [float(row["median"]) for row in rows if row["metric"] == metric] for metric in ("issue_ms", "ms")
    )
    assert all(0 < first < last for first, last in zip(issued, ended))
