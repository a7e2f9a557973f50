"""The figures of the tables in README.md and docs/ come from the CSVs in results/.

    python benchmarks/figures.py            # writes each figure that its CSV no longer gives
    python benchmarks/figures.py --check    # names them and exits with 1; `make test` runs it

Needs no GPU. A comment before a table says which rows and columns of a CSV its cells are:

    <!-- figures train_step.csv mode=full
    columns: - | contender=grouped_mm; ms, peak_GiB | ms; contender=grouped_mm ÷ contender=sonicmoe-hf
    row: config=7B; launch=Liger, spread load
    row: config=OLMoE-1B-7B; launch=spread load
    -->

The first line's conditions hold for all cells, those of a column and of a row for theirs, and ` | ` stands between.
`*` in a value stands for anything, and `csv=FILE.csv` is another file. A name without `=` is a column of the CSV, or
else a value of its column `metric`; without a name the cell has the median. A column or row `-` has no figures of a
CSV.

Where several rows differ, `mean`, `sum` or `max` stands before the name. `1e-3 * NAME` is in another unit.
`A ÷ B` is a ratio, in which A's conditions hold for B unless it has its own. Decimals, signs, `k` and `%` stay as the
cell has them.

docs/performance.md also has beside each link to a CSV the commits that its rows were measured at.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINUS = "\N{MINUS SIGN}"  # of the documents
FIGURE = re.compile(rf"(?<![\w.,{MINUS}-])[+{MINUS}-]?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?:k\b|%)?(?!\w)")
MARKER = re.compile(r"^<!-- figures ([\w.]+)(.*?)\n(.*?)\n-->\n\n", re.MULTILINE | re.DOTALL)
VALUE = re.compile(r"(?:([\d.e+-]+) \* )?(?:(mean|sum|max) )?(.+)$")
TOTALS = {"mean": statistics.fmean, "sum": sum, "max": max}
UNITS = {"k": 1e3, "%": 0.01}
WITH_COMMITS = "docs/performance.md"
LINK = re.compile(r"(?<=\()\.\./benchmarks/results/(\w+\.csv)\)((?:\s(?:of|and)\s[0-9a-f]{8})*)")
WITHOUT_COMMIT = {"quality_corpus.csv"}  # a list of packages


@cache
def rows_of(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def conditions(text: str) -> tuple[dict[str, str], list[str]]:
    """Parse (column -> value, names) of `config=7B; ms, peak_GiB`."""
    filters, names = {}, []
    for part in filter(None, map(str.strip, text.split(";"))):
        if "=" in part:
            column, value = part.split("=", 1)
            filters[column] = value
        else:
            names += [name.strip() for name in part.split(",")]
    return filters, names


def value_of(folder: Path, name: str, filters: dict[str, str]) -> float:
    """Look up a column, or the median of a metric, of the rows of the file `csv` that meet the other conditions.

    Raises:
        ValueError: no row, or several with different values and no name of how to take them together.
    """
    match = VALUE.match(name)
    assert match is not None
    factor, total, column = match.groups()
    path = folder / filters.pop("csv")
    rows = rows_of(path)
    if column not in rows[0]:
        filters = {**filters, "metric": column}
        column = "median" if "median" in rows[0] else "value"
    if unknown := filters.keys() - rows[0].keys():
        raise ValueError(f"{path.name} has no column {sorted(unknown)}")
    matching = [row for row in rows if all(fnmatchcase(row[key], value) for key, value in filters.items())]
    values = [float(row[column]) for row in matching]
    if not values or (total is None and len(set(values)) > 1):
        raise ValueError(f"{path.name} has {len(values)} rows of {filters}: {column} {sorted(set(values))}")
    value = TOTALS[total](values) if total else values[0]
    return value * float(factor or 1)


def values_of(folder: Path, outer: dict[str, str], cell: str) -> list[float]:
    """List the figures of a cell. outer: the conditions of its row and table."""
    first, _, second = cell.partition(" ÷ ")
    filters, names = conditions(first)
    filters = {**outer, **filters}
    figures = [value_of(folder, name, dict(filters)) for name in names or ["median"]]
    if second:
        others, other_names = conditions(second)
        divisor = value_of(folder, (other_names or names or ["median"])[0], {**filters, **others})
        figures = [figure / divisor for figure in figures]
    return figures


def rounded(written: str, value: float) -> str:
    """Round the value as the cell has its figure; as it is if that is the value, rounded either way at half a unit."""
    unit = UNITS.get(written[-1], 1.0)
    digits = written.rstrip("k%")
    decimals = len(digits.partition(".")[2])
    before = float(digits.replace(",", "").replace(MINUS, "-"))
    if abs(before * unit - value) <= 0.5 * unit * 10.0**-decimals * (1 + 1e-6):
        return written
    sign = "+" if written[0] == "+" else ""
    text = format(value / unit, f"{sign}{',' if ',' in digits else ''}.{decimals}f")
    return text.replace("-", MINUS) + (written[-1] if written[-1] in UNITS else "")


def cell_with(cell: str, values: list[float]) -> str:
    """Put these values into the cell in place of its figures.

    Raises:
        ValueError: it has another number of figures.
    """
    written = FIGURE.findall(cell)
    if len(written) != len(values):
        raise ValueError(f"{cell.strip()!r} has {len(written)} figures, and its CSV gives {values}")
    numbers = map(rounded, written, values)
    return FIGURE.sub(lambda match: next(numbers), cell)


def updated(text: str, folder: Path) -> Iterator[tuple[int, int, str, str]]:
    """Yield (start, end, line, what is wrong) of each row of a table behind a marker, with the line as the CSV has
    it."""
    for marker in MARKER.finditer(text):
        file, first, body = marker.groups()
        specification = [line.partition(":")[::2] for line in body.splitlines()]
        [columns] = [rest.split(" | ") for key, rest in specification if key == "columns"]
        filters = [row.strip() for key, rest in specification if key == "row" for row in rest.split(" | ")]
        table = text[marker.end() :].partition("\n\n")[0].split("\n")
        start = marker.end() + sum(len(line) + 1 for line in table[:2])
        rows = [line for line in table[2:] if line.startswith("|")]
        if len(rows) != len(filters):
            yield start, start, "", f"the table has {len(rows)} rows, and its comment {len(filters)}"
            continue
        for line, row in zip(rows, filters):
            cells, faults = line.strip("|").split("|"), []
            if len(cells) != len(columns):
                faults.append(f"{len(cells)} cells, and {len(columns)} in the comment")
            elif row != "-":
                outer = {"csv": file, **conditions(first)[0], **conditions(row)[0]}
                for index, (cell, column) in enumerate(zip(cells, map(str.strip, columns))):
                    if column != "-" and FIGURE.search(cell):
                        try:
                            cells[index] = cell_with(cell, values_of(folder, outer, column))
                        except ValueError as error:
                            faults.append(str(error))
            after = f"|{'|'.join(cells)}|"
            if after != line:
                faults.append(f"{line} should be {after}")
            yield start, start + len(line), after, "; ".join(faults)
            start += len(line) + 1


def with_commits(text: str, folder: Path) -> Iterator[tuple[int, int, str, str]]:
    """Yield (start, end, commits, what is wrong) of what stands behind each link to a CSV."""
    for link in LINK.finditer(text):
        commits = sorted({row["commit"][:8] for row in rows_of(folder / link[1])})
        after = f" of {' and '.join(commits)}"
        is_right = link[2].split() == after.split()
        yield *link.span(2), link[2] if is_right else after, "" if is_right else f"{link[1]} is{after}"


def unnamed(root: Path, texts: str) -> Iterator[str]:
    """Yield CSVs that no document names, or whose rows do not name their commit."""
    for path in sorted((root / "benchmarks" / "results").glob("*.csv")):
        if path.name not in texts:
            yield f"{path.name}: no document names it"
        if path.name not in WITHOUT_COMMIT and not all(row.get("commit") for row in rows_of(path)):
            yield f"{path.name}: rows without a commit"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change no document")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    options = parser.parse_args(arguments)
    faults = []
    documents = [options.root / "README.md", *sorted((options.root / "docs").glob("*.md"))]
    for path in documents:
        before = text = path.read_text(encoding="utf-8")
        results = options.root / "benchmarks" / "results"
        changes = list(updated(before, results))
        if path == options.root / WITH_COMMITS:
            changes += with_commits(before, results)
        for start, end, line, fault in sorted(changes, reverse=True):
            text = text[:start] + line + text[end:]
            if fault:
                faults.append(f"{path.relative_to(options.root)}:{before.count(chr(10), 0, start) + 1}: {fault}")
        if text != before and not options.check:
            path.write_text(text, encoding="utf-8")
    logs = (options.root / "dev").rglob("*.md")
    faults += unnamed(options.root, "\n".join(path.read_text(encoding="utf-8") for path in [*documents, *logs]))
    print("\n".join(faults) or "every figure is its CSV's")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
