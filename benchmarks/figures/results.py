"""Figures of the CSVs in benchmarks/results, each with the name of where it comes from, and what is computed of them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.paths import RESULTS


class Figure(NamedTuple):
    """A value, and the cell or the computation that gives it; NaN where the CSV has no such row."""

    value: float
    source: str


@cache
def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Results(NamedTuple):
    """The CSVs of a folder."""

    folder: Path = RESULTS

    def rows(self, file: str, **filters) -> list[dict[str, str]]:
        """The rows of `file`.csv whose columns are these."""
        found = _read(self.folder / f"{file}.csv")
        for name, value in filters.items():
            found = [row for row in found if row[name] == str(value)]
        return found

    def all(self, file: str, column: str = "median", **filters) -> list[Figure]:
        """`column` of every row that `rows` finds."""
        source = f"{file}.csv: {column} of " + ", ".join(f"{name} = {value}" for name, value in filters.items())
        return [Figure(float(row[column]), source) for row in self.rows(file, **filters)]

    def one(self, file: str, column: str = "median", **filters) -> Figure:
        """`column` of the row; NaN where there is none.

        Raises:
            ValueError: several rows, with several values.
        """
        found = self.all(file, column, **filters)
        if len({figure.value for figure in found}) > 1:
            raise ValueError(f"{found[0].source}: {len(found)} rows; name more columns")
        return found[0] if found else Figure(math.nan, f"no row of {file}.csv: {filters}")


def computed(value: float, how: str) -> Figure:
    """What follows from sizes alone."""
    return Figure(value, how)


def ratio(a: Figure, b: Figure) -> Figure:
    """a / b."""
    return Figure(a.value / b.value, f"({a.source}) / ({b.source})")


def difference(a: Figure, b: Figure) -> Figure:
    """a - b."""
    return Figure(a.value - b.value, f"({a.source}) - ({b.source})")


def total(figures: Iterable[Figure]) -> Figure:
    """Their sum."""
    figures = list(figures)
    return Figure(sum(figure.value for figure in figures), " + ".join(figure.source for figure in figures))


def times(factor: float, figure: Figure) -> Figure:
    """In another unit, or less one."""
    return Figure(factor * figure.value, f"{factor:g} * ({figure.source})")


def more_than_one(figure: Figure) -> Figure:
    """A ratio less one: +0.5% of 1.005."""
    return Figure(figure.value - 1, f"({figure.source}) - 1")


def mean(figures: Iterable[Figure]) -> Figure:
    """Their mean."""
    figures = list(figures)
    return Figure(statistics.fmean(figure.value for figure in figures), f"mean of {figures[0].source}")


def span(figures: Iterable[Figure]) -> tuple[Figure, Figure]:
    """(the least, the greatest): "0.2 to 0.5"."""
    figures = [figure for figure in figures if not math.isnan(figure.value)]
    return min(figures), max(figures)
