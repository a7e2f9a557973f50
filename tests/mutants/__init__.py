"""Mutations: small wrong changes of the source, each with the tests that fail because of it.

Every module here but __main__ has a list MUTATIONS. `make mutants` applies one after the other and runs its tests.
"""

import importlib
import itertools
import pkgutil
import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """path: from the repository's root. before: code that stands there once, however its lines are broken and indented; after:
    what takes its place. why: what is wrong then. tests: files or node ids for pytest, separated by spaces, of which one fails."""

    path: str
    before: str
    after: str
    why: str
    tests: str


def by_module(*names: str) -> dict[str, list[Mutation]]:
    """The mutations of these modules, or of all."""
    every = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "__main__")
    return {name: importlib.import_module(f"{__name__}.{name}").MUTATIONS for name in names or every}


TOKEN = re.compile(r"\w+|[^\w\s]")


def pattern_of(code: str) -> re.Pattern[str]:
    """Matches `code` with any white space between its tokens, and with or without a comma before a closing bracket."""
    tokens = list(TOKEN.finditer(code))
    pieces = [re.escape(tokens[0][0])]
    for before, token in itertools.pairwise(tokens):
        is_apart = before[0][-1].isalnum() and token[0][0].isalnum()
        closes = token[0] in ")]}" and before[0] != ","
        pieces += [r"\s+" if is_apart else r",?\s*" if closes else r"\s*", re.escape(token[0])]
    return re.compile("".join(pieces))


def mutated(mutation: Mutation, source: str) -> str:
    """`source` with the mutation in it, at the indentation of the code that it replaces.

    Raises:
        ValueError: its code does not stand there once, so the mutation must follow a change of the source.
    """
    matches = list(pattern_of(mutation.before).finditer(source))
    if len(matches) != 1:
        raise ValueError(
            f"{mutation.path} has {mutation.before!r} {len(matches)} times; a mutation names code that is there once"
        )
    [match] = matches
    indentation = mutation.before[: -len(mutation.before.lstrip())]  # of the mutation's own text
    after = mutation.after.removeprefix(indentation).rstrip()
    if indentation:
        own = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        after = after.replace("\n" + indentation, "\n" + own)
    return source[: match.start()] + after + source[match.end() :]
