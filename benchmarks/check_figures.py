"""Every figure of the tables in README.md and docs/ is what its CSV says, rounded; so are those of declared sentences.

    python benchmarks/check_figures.py [--root FOLDER]

Needs no GPU. Prints document, line, the figure and what the CSV gives for each that differs, and exits with 1 then.

The files in figures/ declare what a table's cells are and where they come from. A table of a document with figures in it
that is not declared, and not listed in NOT_MEASURED, is a fault too. So are a declared table or sentence that no document
has, and a CSV that no document names or whose rows do not name their commit.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this also runs by its path

from benchmarks.common.paths import ROOT
from benchmarks.figures import layers, training
from benchmarks.figures.documented import NOT_MEASURED, WITHOUT_COMMIT, Sentence, Table
from benchmarks.figures.results import Figure, Results

MINUS = "\N{MINUS SIGN}"  # of the documents
NUMBER = rf"[+{MINUS}-]?(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?:k\b|%)?"
FIGURE = re.compile(rf"(?<![\w.,{MINUS}-]){NUMBER}(?!\w)")
UNITS = {"k": 1e3, "%": 0.01}


class Found(NamedTuple):
    """A table of a document: its header, and its rows as (line, cells)."""

    header: str
    rows: list[tuple[int, list[str]]]


def value_of(text: str) -> tuple[float, float]:
    """(value, one unit of the last digit) of "−1,234", "2.96", "45.3k" or "+0.6%"."""
    unit = UNITS.get(text[-1], 1.0)
    digits = text.rstrip("k%").replace(",", "").replace(MINUS, "-")
    decimals = len(digits.partition(".")[2])
    return float(digits) * unit, unit * 10.0**-decimals


def is_rounded(text: str, figure: Figure) -> bool:
    """Whether `text` is the figure to as many digits as it has: half a unit of the last one away at most."""
    value, unit = value_of(text)
    return abs(value - figure.value) <= 0.5 * unit * (1 + 1e-6)  # NaN is not


def cells_of(line: str) -> list[str]:
    """Of a row of a table, without emphasis."""
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


def tables_of(text: str) -> Iterator[Found]:
    """The tables of a document."""
    lines = text.splitlines()
    for number, line in enumerate(lines[1:], 1):
        if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line.strip()):
            rows = []
            for below in range(number + 1, len(lines)):
                if not lines[below].lstrip().startswith("|"):
                    break
                rows.append((below + 1, cells_of(lines[below])))
            yield Found(lines[number - 1].strip(), rows)


def compare(place: str, text: str, expected: Sequence[Figure]) -> Iterator[str]:
    """What is wrong with the figures of a cell or sentence."""
    written = FIGURE.findall(text)
    expected = [figure for figure in expected if not (math.isnan(figure.value) and not written)]
    if len(written) != len(expected):
        sources = "; ".join(f"{figure.value:g} ({figure.source})" for figure in expected)
        yield f"{place}: {text!r} has {len(written)} figures, and there should be {len(expected)}: {sources}"
        return
    for figure, number in zip(expected, written):
        if not is_rounded(number, figure):
            yield f"{place}: {number} should be {figure.value:.6g} ({figure.source})"


def check_table(document: str, found: Found, table: Table) -> Iterator[str]:
    """What is wrong with a table's cells."""
    if len(found.rows) != len(table.rows):
        yield f"{document}:{found.rows[0][0]}: {len(found.rows)} rows, and {len(table.rows)} are declared"
    for (line, cells), expected in zip(found.rows, table.rows):
        place = f"{document}:{line}"
        if len(cells) != len(expected):
            yield f"{place}: {len(cells)} cells, and {len(expected)} are declared"
            continue
        for cell, figures in zip(cells, expected):
            if isinstance(figures, str):
                if cell != figures:
                    yield f"{place}: {cell!r} should be {figures!r}"
            else:
                yield from compare(place, cell, [figures] if isinstance(figures, Figure) else figures)


def check_sentence(document: str, text: str, sentence: Sentence) -> Iterator[str]:
    """What is wrong with a sentence's figures."""
    pattern = re.escape(sentence.text).replace(r"\#", f"({NUMBER})").replace(r"\ ", r"\s+")
    matches = list(re.finditer(pattern, text))
    if len(matches) != 1:
        yield f"{document}: {sentence.text!r} is declared, and stands there {len(matches)} times"
        return
    line = text.count("\n", 0, matches[0].start()) + 1
    if len(matches[0].groups()) != len(sentence.figures):
        yield f"{document}:{line}: {sentence.text!r} is declared with {len(sentence.figures)} figures"
    for number, figure in zip(matches[0].groups(), sentence.figures):
        if not is_rounded(number, figure):
            yield f"{document}:{line}: {number} should be {figure.value:.6g} ({figure.source})"


def documents_of(root: Path) -> dict[str, str]:
    """Name -> text, of README.md and docs/."""
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def check_documents(documents: dict[str, str], results: Results) -> Iterator[str]:
    """All that is wrong with their figures."""
    declared = [*layers.declared(results), *training.declared(results)]
    tables = {(entry.document, entry.header): entry for entry in declared if isinstance(entry, Table)}
    for document, text in documents.items():
        for found in tables_of(text):
            table = tables.pop((document, found.header), None)
            if table is not None:
                yield from check_table(document, found, table)
            elif not {document, (document, found.header)} & NOT_MEASURED.keys():
                for line, cells in found.rows:
                    if any(FIGURE.search(cell) for cell in cells):
                        yield f"{document}:{line}: figures that nothing declares, in the table {found.header!r}"
                        break
    for document, header in tables:
        yield f"{document}: no table {header!r}, or two"
    for entry in declared:
        if isinstance(entry, Sentence):
            yield from check_sentence(entry.document, documents[entry.document], entry)


def check_results(documents: dict[str, str], root: Path) -> Iterator[str]:
    """What is wrong with the CSVs themselves; the logs in dev/ count as documents that name them."""
    logs = [path.read_text(encoding="utf-8") for path in (root / "dev").rglob("*.md")]
    texts, folder = "\n".join([*documents.values(), *logs]), root / "benchmarks" / "results"
    for path in sorted(folder.glob("*.csv")):
        rows = Results(folder).rows(path.stem)
        if path.name not in texts:
            yield f"{path.name}: no document names it"
        if path.name not in WITHOUT_COMMIT and not all(row.get("commit") for row in rows):
            yield f"{path.name}: rows without a commit"


def faults(root: Path = ROOT) -> list[str]:
    """All that is wrong."""
    documents = documents_of(root)
    return [*check_documents(documents, Results(root / "benchmarks" / "results")), *check_results(documents, root)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    found = faults(parser.parse_args().root)
    print("\n".join(found) or "every figure is its CSV's")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
