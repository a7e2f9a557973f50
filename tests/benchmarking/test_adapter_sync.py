"""The benchmark of what vLLM waits for at each sync writes both forms of an adapter."""

import csv

from benchmarks.step.adapter_sync import main


def test_both_forms_are_written_and_timed(tmp_path):
    main(["--device", "cpu", "--tiny", "--rounds", "1", "--csv", str(tmp_path / "rows.csv")])
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = {(row["form"], row["metric"]): float(row["median"]) for row in csv.DictReader(file)}
    assert rows["PEFT's own", "tensors"] == 2 * (2 * 4 + 4), "two layers: attention, and two weights of experts"
    assert rows["a pair for each expert", "tensors"] == 2 * (2 * 4 + 2 * 3 * 8) and len(rows) == 6
