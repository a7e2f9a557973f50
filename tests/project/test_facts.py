"""The tables of facts about other packages are there, and what was read in an older version is named by a warning."""

import importlib
import warnings

import pytest
from helpers import facts
from helpers.facts import FACTS, Fact

pytestmark = pytest.mark.pinned


def test_the_tables_are_there_and_each_is_listed_once():
    tables = [(fact.module, name) for fact in FACTS for name in fact.names]
    assert len(set(tables)) == len(tables)
    for module, name in tables:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_no_table_was_read_in_a_version_that_is_still_to_come():
    known = facts.newest()
    for fact in FACTS:
        assert facts.number(fact.version) <= facts.number(known[fact.package]), fact
    for sentence in facts.outdated():
        warnings.warn(sentence, stacklevel=1)


def test_a_table_read_in_an_older_version_is_named(monkeypatch):
    monkeypatch.setattr(facts, "FACTS", [Fact("a.module", ("A", "B"), "vllm", "0.9.1", "2025-01-01")])
    (sentence,) = facts.outdated()
    assert sentence == "a.module: A, B read in vllm 0.9.1 on 2025-01-01; the newest is 0.33.0"
