"""Tests of what runs with other versions of packages: one case of every test, and whole what compares others' own."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.stacks import EVERYWHERE, OF_EVERY_FAMILY, OURS, runs_with

pytestmark = pytest.mark.pinned
TESTS = Path(__file__).parent.parent


def test_every_test_runs_with_the_oldest_or_the_newest_and_those_of_other_packages_own_with_both():
    files = [
        "tests/layer/test_routing.py",
        "tests/trainer/test_trainer.py",
        "tests/adapters/test_merge_families.py",
        "tests/project/test_private.py",
    ]
    names = [f"{file}::test_{test}[{case}]" for file in files for test in range(5) for case in range(7)]
    items = [SimpleNamespace(nodeid=name) for name in names]
    chosen = {versions: [item.nodeid for item in runs_with(versions, items)] for versions in ("oldest", "newest")}
    tests = {name.partition("[")[0] for name in names}
    assert {name.partition("[")[0] for part in chosen.values() for name in part} == tests
    cases = {v: Counter(name.partition("::")[0] for name in part) for v, part in chosen.items()}
    assert [cases["oldest"][file] for file in files] == [2 * 3, 5 * 3, 2 * 3, 5 * 7]
    assert [cases["newest"][file] for file in files] == [3 * 3, 5 * 3, 5 * 7, 5 * 7]


@pytest.mark.parametrize("path", [*OURS, *EVERYWHERE, *OF_EVERY_FAMILY])
def test_what_is_named_is_there(path):
    assert (TESTS.parent / path).exists()
