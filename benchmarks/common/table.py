"""What the CSVs of times have in common: a row is the median of one metric of one contender."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.common import provenance

FIELDS = (
    "config",
    "shape",
    "contender",
    "mode",
    "launch",
    "metric",
    "median",
    "p20",
    "p80",
    "gpu",
    "commit",
    "versions",
    "date",
)

RUN = FIELDS[: FIELDS.index("metric")]  # what was measured, in several metrics


def quantiles(values):
    return [torch.tensor(values).double().quantile(q).item() for q in (0.5, 0.2, 0.8)]


class Table:
    """The CSV's rows, and the figures to print."""

    def __init__(self):
        self.rows = []
        self.common = {"gpu": provenance.gpu(), **provenance.columns()}

    def add(self, config, shape, contender, mode, launch, metric, values):
        median, p20, p80 = quantiles(values)
        self.rows.append(
            dict(zip(FIELDS, (config, str(shape), contender, mode, launch, metric)))
            | {"median": f"{median:.6g}", "p20": f"{p20:.6g}", "p80": f"{p80:.6g}"}
            | self.common
        )

    def write(self, path, keep=False):
        """Anew, or with what the file has of other runs; raises SystemExit rather than put figures without a GPU in the
        place of a GPU's."""
        others = read_rows([path]) if keep and Path(path).exists() else []
        own = {run_of(row) for row in self.rows}
        kept = [row for row in others if row["gpu"] == self.common["gpu"] and run_of(row) not in own]
        provenance.write_rows(path, FIELDS, kept + self.rows)

    def get(self, **wanted):
        found = [float(r["median"]) for r in self.rows if all(r[key] == value for key, value in wanted.items())]
        return found[0] if found else float("nan")


def run_of(row: dict[str, str]) -> tuple[str, ...]:
    """Which run a row is of."""
    return tuple(row[name] for name in RUN)


def read_rows(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of several CSV files; of those that measure the same, the last."""
    found = {}
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found[(*run_of(row), row["metric"])] = row
    return list(found.values())
