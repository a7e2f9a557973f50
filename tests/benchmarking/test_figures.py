"""benchmarks/figures.py: the figures of the documents' tables are those of the CSVs, and others are written anew."""

import shutil
from pathlib import Path

import pytest

from benchmarks import figures

pytestmark = pytest.mark.pinned
ROOT = Path(__file__).parents[2]
CASES = ("ours,ms,12.34", "ours,GiB,1.06", "theirs,ms,24680", "twice,ms,1", "twice,ms,3")
CSV = "".join(f"{row}\n" for row in ("case,metric,median,commit", *(f"{case},0a1b2c3d4e5f" for case in CASES)))
DOCUMENT = """From steps.csv:

<!-- figures steps.csv
columns: - | ms, GiB | case=theirs; ms ÷ case=ours | 1e-3 * mean ms
row: case=ours
row: case=theirs
row: case=twice
row: -
-->

| 100 layers | ms, GiB | ratio | s |
|---|---|---|---|
| ours | 12.3 ms, 1.1 GiB | 2000 | 0.012 |
| theirs | out of memory | **2,000** | 24.7 |
| both | | | 0.002 |
| elsewhere | 7 | 8 | 9 |
"""


@pytest.fixture
def root(tmp_path):
    for folder in ("docs", "dev", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("", encoding="utf-8")
    (tmp_path / "docs" / "steps.md").write_text(DOCUMENT, encoding="utf-8")
    (tmp_path / "benchmarks" / "results" / "steps.csv").write_text(CSV, encoding="utf-8")
    return tmp_path


def run(capsys, root, *arguments):
    """Run the script. Returns (exit code, what it prints, the document after it)."""
    figures.rows_of.cache_clear()
    with pytest.raises(SystemExit) as exit:
        figures.main(["--root", str(root), *arguments])
    return exit.value.code, capsys.readouterr().out, (root / "docs" / "steps.md").read_text(encoding="utf-8")


def test_every_figure_of_the_documents_is_its_csvs(capsys):
    with pytest.raises(SystemExit) as exit:
        figures.main(["--check"])
    assert exit.value.code == 0, capsys.readouterr().out


def test_figures_that_are_their_csvs_stay(root, capsys):
    assert run(capsys, root) == (0, "every figure is its CSV's\n", DOCUMENT)


def test_the_commits_beside_the_csvs_of_performance_are_those_of_their_rows(root, capsys):
    path = root / "docs" / "performance.md"
    path.write_text("Of ([CSV](../benchmarks/results/steps.csv) of 0123abcd, `command`).\n", encoding="utf-8")
    code, fault, _ = run(capsys, root)
    assert code == 1 and "docs/performance.md:1: steps.csv is of " in fault
    written = path.read_text(encoding="utf-8")
    commit = figures.rows_of(root / "benchmarks" / "results" / "steps.csv")[0]["commit"][:8]
    assert f"steps.csv) of {commit}, `command`" in written and "0123abcd" not in written
    assert run(capsys, root, "--check")[0] == 0


def test_figures_of_a_new_measurement_are_written_as_the_old_ones_were(root, capsys):
    path = root / "benchmarks" / "results" / "steps.csv"
    path.write_text(CSV.replace("12.34", "10").replace("1.06", "0.5"), encoding="utf-8")
    code, fault, unchanged = run(capsys, root, "--check")
    assert code == 1 and unchanged == DOCUMENT
    assert "docs/steps.md:13: | ours | 12.3 ms, 1.1 GiB | 2000 | 0.012 | should be | ours | 10.0 ms, 0.5 GiB" in fault
    _, _, document = run(capsys, root)
    expected = DOCUMENT.replace("12.3 ms, 1.1", "10.0 ms, 0.5").replace("2000", "2468").replace("2,000", "2,468")
    assert document == expected.replace("0.012", "0.010")
    assert run(capsys, root) == (0, "every figure is its CSV's\n", document)


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("12.3 ms, 1.1 GiB", "12.3 ms", "'12.3 ms' has 1 figures, and its CSV gives [12.34, 1.06]"),
        ("row: -\n", "", "the table has 4 rows, and its comment 3"),
        ("| 0.002 |", "| 0.002 | |", "5 cells, and 4 in the comment"),
        ("case=twice", "case=thrice", "steps.csv has 0 rows of {'case': 'thrice', 'metric': 'ms'}"),
        ("mean ms", "ms", "steps.csv has 2 rows of {'case': 'twice', 'metric': 'ms'}: median [1.0, 3.0]"),
        ("row: case=ours", "row: kind=ours", "steps.csv has no column ['kind']"),
    ],
)
def test_a_comment_that_does_not_fit_its_table_or_csv_is_a_fault(root, capsys, before, after, fault):
    assert DOCUMENT.count(before) == 1
    (root / "docs" / "steps.md").write_text(DOCUMENT.replace(before, after), encoding="utf-8")
    code, output, _ = run(capsys, root)
    assert code == 1 and fault in output


def test_a_csv_needs_a_commit_and_a_document_that_names_it(root, capsys):
    shutil.copy(root / "benchmarks" / "results" / "steps.csv", root / "benchmarks" / "results" / "other.csv")
    (root / "benchmarks" / "results" / "steps.csv").write_text(
        CSV.replace("twice,ms,3,0a1b2c3d4e5f", "twice,ms,3,"), "utf-8"
    )
    _, output, _ = run(capsys, root)
    assert output == "other.csv: no document names it\nsteps.csv: rows without a commit\n"


@pytest.mark.parametrize(
    ("written", "value", "rounded"),
    [
        ("2.96", 2.955, "2.96"),
        ("2.95", 2.955, "2.95"),  # either side of a half
        ("2.97", 2.964, "2.96"),
        ("45.4k", 45348.2, "45.3k"),
        ("100,871", 100872.4, "100,872"),
        ("999", 12345.0, "12345"),
        ("+0.6%", 0.00586, "+0.6%"),
        ("+0.6%", -0.00786, "\N{MINUS SIGN}0.8%"),
        ("\N{MINUS SIGN}0.053", 0.05347, "0.053"),
    ],
)
def test_a_figure_keeps_its_form(written, value, rounded):
    assert figures.rounded(written, value) == rounded


def test_the_ranges_that_the_readme_opens_with_are_those_of_the_columns_that_it_names():
    """Of each model and setting: grouped_mm's time over ours, and our memory over grouped_mm's."""
    rows = [
        row for row in figures.rows_of(ROOT / "benchmarks" / "results" / "train_step.csv") if row["mode"] == "full"
    ]
    cases = {(row["config"], row["shape"], row["launch"]): {} for row in rows if row["contender"] == "grouped_mm"}
    for row in rows:
        case = cases.get((row["config"], row["shape"], row["launch"]), {})
        case[row["contender"], row["metric"]] = float(row["median"])
    speed, memory = (
        {case: of["grouped_mm", metric] / of["sonicmoe-hf", metric] for case, of in cases.items()}
        for metric in ("ms", "peak_GiB")
    )
    less = [case for case in cases if case[0] == "gpt-oss-20b" or "compiled layers" in case[2]]
    usual = cases.keys() - set(less)
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    fastest, slowest = (f"{choose(speed[case] for case in usual):.2f}" for choose in (max, min))
    smallest, largest = (f"{1 / choose(memory[case] for case in usual):.0%}" for choose in (max, min))
    assert f"is {slowest} to {fastest} times as fast as with Transformers' default, `grouped_mm`," in text
    assert f"in {smallest} to {largest} of its peak memory**: `ms` and `peak_GiB` in the" in text
    first, last = (f"{choose(speed[case] for case in less):.2f}" for choose in (min, max))
    assert f"gpt-oss-20b and compiled layers gain less, {first} to {last}." in text


def test_figures_are_told_from_names():
    text = "bf16, sm_90, Qwen3-30B-A3B, H200: 1,453, 95.1 and 0.5%; 1.2 to 3.4k"
    assert figures.FIGURE.findall(text) == ["1,453", "95.1", "0.5%", "1.2", "3.4k"]
