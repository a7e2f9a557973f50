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
    run(monkeypatch, "--no-check", "--csv", str(path))
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
        run(monkeypatch, "--no-check", "--csv", str(path), "--execution", "eager", "--tokens", tokens)
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


def test_a_compiled_step_that_computes_something_else_fails_the_check(monkeypatch):
    """Nothing is compiled here: eager results stand for the compiled ones, as they are and changed."""
    right, factors = small_batches.loss_and_gradients, []

    def scaled(call, model, tokens, autocast):
        factor = factors.pop(0)
        return {name: factor * tensor for name, tensor in right(model, model, tokens, autocast).items()}

    monkeypatch.setattr(small_batches, "loss_and_gradients", scaled)
    factors[:] = [1.0, 1.0, 1.0]
    run(monkeypatch, "--check")
    factors[:] = [1.0, 1.1, 1.1]
    with pytest.raises(SystemExit, match=r"compiled steps are wrong:\nsonicmoe-hf, layers: loss 0.1"):
        run(monkeypatch, "--check")
