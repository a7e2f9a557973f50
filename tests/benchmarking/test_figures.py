"""benchmarks/check_figures.py: the figures of README.md and docs/ are those of the CSVs, and a wrong one is found."""

import math
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import check_figures as check
from benchmarks.figures.results import Figure

pytestmark = pytest.mark.pinned
ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tmp_path):
    """README.md, docs/, dev/ and the CSVs, to be changed."""
    logs = ROOT.glob("dev/**/*.md")
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *logs, *ROOT.glob("benchmarks/results/*.csv")):
        place = tmp_path / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return tmp_path


def change(path, before, after):
    """One place of a file; returns its line."""
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, before
    path.write_text(text.replace(before, after), encoding="utf-8")
    return text.count("\n", 0, text.index(before)) + 1


def change_figure(path, pattern):
    """The last digit of the figure that a pattern's group finds; returns the line and the figure that now stands there."""
    text = path.read_text(encoding="utf-8")
    [place] = re.finditer(pattern, text, re.MULTILINE)
    figure = place[1]
    last = max(position for position, letter in enumerate(figure) if letter.isdigit())
    wrong = figure[:last] + str((int(figure[last]) + 5) % 10) + figure[last + 1 :]
    path.write_text(text[: place.start(1)] + wrong + text[place.end(1) :], encoding="utf-8")
    return text.count("\n", 0, place.start(1)) + 1, wrong


def test_every_figure_of_the_documents_is_its_csvs():
    assert check.faults() == []


# Cells with one figure, with several, with a unit, with a sign and with an error; a sentence; a cell that has too few
CHANGED_FIGURES = (
    ("README.md", r"^\| LoRA on experts and attention .* \| (\d+) GiB \|$"),
    ("docs/performance.md", r"^\| 24576, 1536, 256, 128, 8 \| eager \| [\d.]+ \| ([\d.]+) \|"),
    ("docs/performance.md", r"^\| Qwen3-30B-A3B, 16 of 48, .*? \| [\d.]+k, (\d+) ms,"),
    ("docs/packed-experts.md", r"^\| tokens \| NF4 \| MXFP4 .*\n\|[-|]*\n\| 1 \| ([\d.]+) \|"),
    ("docs/packed-experts.md", r"On an H200 this runs at ([\d.]+) to "),
    ("docs/replay.md", r"^\| recording \| (.[\d.]+%) \|"),
    ("docs/token-rounding.md", r"^\| \| 2 \| \*\*\+0\.031 ± ([\d.]+)\*\*"),
)
OTHER_CHANGES = (
    ("README.md", "| not measured |", "| measured |", "'measured' should be 'not measured'"),
    ("docs/lora.md", "2200, 95.1 |", "2200 |", "'2200' has 1 figures, and there should be 2"),
)


def test_a_figure_that_its_csv_does_not_give_is_named_with_its_line(copy):
    expected = [
        (document, change(copy / document, *words), re.escape(fault)) for document, *words, fault in OTHER_CHANGES
    ]
    for document, pattern in CHANGED_FIGURES:
        line, wrong = change_figure(copy / document, pattern)
        expected.append((document, line, rf"{re.escape(wrong)} should be -?\d"))
    found = check.faults(copy)
    assert len(found) == len(expected)
    for document, line, fault in expected:
        assert any(re.match(rf"{document}:{line}: .*{fault}", text) for text in found), (document, line, fault, found)


def test_a_csv_that_was_measured_again_disagrees_with_every_table_and_sentence_that_has_its_figure(copy):
    path = copy / "benchmarks" / "results" / "moe_layer.csv"
    text = path.read_text(encoding="utf-8")
    row = re.search(r"\n7B,[^\n]*?,hopper,forward\+backward,eager,ms,([\d.]+),", text)
    before = float(row[1])
    after = round(0.95 * before, 2)
    path.write_text(text[: row.start(1)] + str(after) + text[row.end(1) :], encoding="utf-8")
    found = "\n".join(check.faults(copy))
    assert len(found.splitlines()) >= 2
    table = rf"docs/performance.md:\d+: {before:.2f} should be {after:g} \(moe_layer.csv: median of config = 7B"
    assert re.search(table, found)
    assert re.search(r"README.md:\d+: 3\.\d should be 3\.", found), "times as fast as grouped_mm"


def test_a_row_that_a_csv_no_longer_has_is_missed(copy):
    path = copy / "benchmarks" / "results" / "replay_step.csv"
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [row for row in rows if ",recording," not in row or ",6," not in row]
    path.write_text("".join(kept), encoding="utf-8")
    found = check.faults(copy)
    assert len(found) == 2 and all("should be nan ((no row of replay_step.csv" in fault for fault in found)


def test_a_table_with_figures_must_be_declared(copy):
    path = copy / "docs" / "replay.md"
    table = "\n| ours | theirs |\n|---|---|\n| fast | slow |\n"
    path.write_text(path.read_text(encoding="utf-8") + table, encoding="utf-8")
    assert check.faults(copy) == []
    change(path, "| fast | slow |", "| fast, 3.1 ms | slow |")
    [fault] = check.faults(copy)
    assert "figures that nothing declares, in the table '| ours | theirs |'" in fault


def test_a_declared_table_or_sentence_that_is_gone_is_named(copy):
    change(
        copy / "docs" / "packed-experts.md",
        "| tokens | NF4 | MXFP4 | NVFP4 | FP8 |",
        "| tokens | NF4 | of MXFP4 | NVFP4 | FP8 |",
    )
    change(copy / "docs" / "packed-experts.md", "On an H200 this runs", "On a GPU this runs")
    found = check.faults(copy)
    assert any("no table '| tokens | NF4 | MXFP4 | NVFP4 | FP8 |'" in fault for fault in found)
    assert any("'On an H200 this runs at # to # TB/s, read and written' is declared" in fault for fault in found)


def test_a_csv_needs_a_commit_and_a_document_that_names_it(copy):
    (copy / "benchmarks" / "results" / "old.csv").write_text("shape,ms\n1,2\n", encoding="utf-8")
    assert check.faults(copy) == ["old.csv: no document names it", "old.csv: rows without a commit"]


@pytest.mark.parametrize(
    ("written", "value", "rounded"),
    [
        ("2.96", 2.955, True),
        ("2.95", 2.955, True),  # either side of a half
        ("2.97", 2.964, False),
        ("1.76", 1.75263, False),
        ("45.3k", 45348.2, True),
        ("45.4k", 45348.2, False),
        ("100,872", 100872.4, True),
        ("+0.6%", 0.00586, True),
        ("\N{MINUS SIGN}0.053", -0.05347, True),
        ("0.053", -0.05347, False),
        ("1", math.nan, False),
    ],
)
def test_a_figure_may_be_half_a_unit_of_its_last_digit_away(written, value, rounded):
    figure = Figure(value, "a CSV")
    assert check.is_rounded(written, figure) is rounded


def test_figures_are_told_from_names():
    assert check.FIGURE.findall("bf16, sm_90, Qwen3-30B-A3B, H200: 1,453, 95.1 and 0.5%; 1.2 to 3.4k") == [
        "1,453",
        "95.1",
        "0.5%",
        "1.2",
        "3.4k",
    ]
