"""Mutations: small wrong changes of the source, each with the tests that fail because of it.

Every module here but __main__ has a list MUTATIONS. `make mutants` applies one after the other and runs its tests.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """path: from the repository's root. before: text that stands there once; after: what takes its place. why: what is
    wrong then. tests: files or node ids for pytest, separated by spaces, of which one fails."""

    path: str
    before: str
    after: str
    why: str
    tests: str


def by_module(*names: str) -> dict[str, list[Mutation]]:
    """The mutations of these modules, or of all."""
    every = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__")
    return {name: importlib.import_module(f"{__name__}.{name}").MUTATIONS for name in names or every}


def mutated(mutation: Mutation, source: str) -> str:
    """`source` with the mutation in it.

    Raises:
        ValueError: its text does not stand there once, so the mutation must follow a change of the source.
    """
    count = source.count(mutation.before)
    if count != 1:
        raise ValueError(
            f"{mutation.path} has {mutation.before!r} {count} times; a mutation names text that is there once"
        )
    return source.replace(mutation.before, mutation.after)
