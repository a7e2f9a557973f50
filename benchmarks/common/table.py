"""The CSVs of results/: rows with where they come from, in place of what the file has of the same measurement."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import provenance

KEYS = ("config", "shape", "contender", "mode", "launch", "metric")


def quantile(values: Sequence[float], q: float = 0.5) -> float:
    """Compute the median, or another quantile."""
    return torch.tensor(values).double().quantile(q).item()


QUANTILES = {
    "median": quantile,
    "p20": lambda values: quantile(values, 0.2),
    "p80": lambda values: quantile(values, 0.8),
}
SLOWER = 1.05  # times the last run's: what `Rows.write` says
ON_A_LINE = 16  # metrics that are printed so
RANGE = {"median": quantile, "min": min, "max": max}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV; none where it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def written(row: dict[str, Any]) -> dict[str, str]:
    """Format a row as the file has it."""
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in row.items()}


class Rows:
    """Rows of a CSV.

    Args:
        path: of the file.
        keys: columns that say what was measured. The file's rows of other measurements stay in it; without keys it is
            written anew.
        gpu: whether a column names the GPU.
    """

    def __init__(self, path: Path, keys: Sequence[str] = (), gpu: bool = True):
        self.path, self.keys = path, keys
        self.origin = ({"gpu": provenance.gpu()} if gpu else {}) | provenance.columns()
        self.rows: list[dict[str, str]] = []

    def add(self, **columns: Any) -> None:
        """Add a row, and print it."""
        print("  ".join(written(columns).values()), flush=True)
        self.rows.append(written(columns) | self.origin)

    def slowdowns(self, before: list[dict[str, str]]) -> list[str]:
        """Name the times that are more than 5% above those that the file has of the same measurement on the same card."""
        names = (*self.keys, "metric", "gpu")
        last = {tuple(row.get(name) for name in names): row for row in before}
        sentences = []
        for row in self.rows:
            was = last.get(tuple(row.get(name) for name in names))
            if was is None or row.get("metric") != "ms" or row.get("gpu", "none") == "none":
                continue
            ratio = float(row["median"]) / float(was["median"])
            if ratio > SLOWER:
                what = ", ".join(row[key] for key in self.keys if key != "metric")
                sentences.append(f"SLOWER by {ratio - 1:.0%} than at {was['commit']} ({was['date']}): {what}")
        return sentences

    def write(self) -> None:
        """Bring the file up to date, and print what has become slower on the same card.

        Raises:
            SystemExit: it has a GPU's figures, and these are none.
        """
        before = read_rows(self.path)
        if all(row.get("gpu") == "none" for row in self.rows) and any(row.get("gpu") != "none" for row in before):
            raise SystemExit(f"{self.path} has a GPU's figures, and these are none: name another file by --csv")
        for sentence in self.slowdowns(before):
            print(sentence, flush=True)
        measured = {tuple(row[key] for key in self.keys) for row in self.rows}
        rows = [row for row in before if tuple(row[key] for key in self.keys) not in measured] + self.rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(
                file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(rows)


class Table(Rows):
    """Rows of several values of one metric each.

    Args:
        path: of the file.
        columns: those before the figures. The last is the metric, the others say what was measured.
        figures: what a row has of the values, by column.
    """

    def __init__(self, path: Path, columns: Sequence[str] = KEYS, figures: dict[str, Callable] = QUANTILES):
        super().__init__(path, columns[:-1])
        self.columns, self.figures = columns, figures

    def add(self, *columns: Any) -> None:
        """Add rows, which are printed: the columns before the metric, and metric -> its values, or the only one."""
        *names, metrics = columns
        medians = []
        for metric, values in metrics.items():
            listed = values if isinstance(values, list) else [values]
            figures = {name: of(listed) for name, of in self.figures.items()}
            medians.append(f"{metric} {figures['median']:.6g}")
            self.rows.append(written(dict(zip(self.columns, (*names, metric))) | figures) | self.origin)
        print(*names, (", " if len(medians) <= ON_A_LINE else "\n    ").join(medians), sep="  ", flush=True)
