"""benchmarks/common/table.py: what a CSV keeps of other runs, and what it is kept from."""

import csv

import pytest

from benchmarks.common import provenance
from benchmarks.common.table import RANGE, Table

pytestmark = pytest.mark.pinned


def added(path, case, **metrics):
    table = Table(path, ("shape", "case", "metric"), RANGE)
    table.add("a shape", case, metrics)
    table.write()
    with path.open(newline="") as file:
        return {(row["case"], row["metric"]): (row["median"], row["max"]) for row in csv.DictReader(file)}


def test_rows_of_other_measurements_stay_and_all_of_the_same_one_are_replaced(tmp_path, capsys):
    path = tmp_path / "results" / "a.csv"
    added(path, "ours", ms=[1.0, 4.0, 2.0], GiB=3)
    rows = added(path, "theirs", ms=[5.0])
    assert rows == {("ours", "ms"): ("2", "4"), ("ours", "GiB"): ("3", "3"), ("theirs", "ms"): ("5", "5")}
    assert added(path, "ours", loss=0.25) == {("theirs", "ms"): ("5", "5"), ("ours", "loss"): ("0.25", "0.25")}
    assert "a shape  ours  ms 2, GiB 3\n" in capsys.readouterr().out


def test_figures_without_a_gpu_do_not_take_the_place_of_a_gpus(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    monkeypatch.setattr(provenance, "gpu", lambda: "NVIDIA H200")
    before = added(path, "ours", ms=[1.0])
    monkeypatch.setattr(provenance, "gpu", lambda: "none")
    with pytest.raises(SystemExit, match="has a GPU's figures, and these are none: name another file by --csv"):
        added(path, "ours", ms=[2.0])
    assert added(tmp_path / "b.csv", "ours", ms=[1.0]) == before


def test_a_time_of_the_same_card_that_grew_by_more_than_five_percent_is_named(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.csv"
    monkeypatch.setattr(provenance, "gpu", lambda: "NVIDIA H200")
    added(path, "ours", ms=[10.0], GiB=3)
    added(path, "ours", ms=[10.4], GiB=9)
    assert "SLOWER" not in capsys.readouterr().out
    added(path, "ours", ms=[11.0])
    assert "SLOWER by 6% than at" in (said := capsys.readouterr().out) and said.endswith(": a shape, ours\n")
    monkeypatch.setattr(provenance, "gpu", lambda: "NVIDIA H100 80GB HBM3")
    added(path, "ours", ms=[20.0])
    assert "SLOWER" not in capsys.readouterr().out
