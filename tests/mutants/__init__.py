"""Mutations: small wrong changes of the source, each with the tests that fail because of it.

`make mutants` applies one after the other and runs its tests. They stand in the files *.diff:

    @@ a path from the repository's root, a file of tests that fails
    # what is wrong then :: the file's tests that fail, where not all have to run, or files and node ids of others
    -code that stands in the path once, however its lines are broken and indented
    +what takes its place
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]


class Mutation(NamedTuple):
    """A wrong change: the code `before` that stands in the file, and `after` it; why that is wrong.

    tests: files or node ids for pytest, separated by spaces, of which one fails.
    """

    path: str
    before: str
    after: str
    why: str
    tests: str


def by_module(*names: str) -> dict[str, list[Mutation]]:
    """Read the mutations of these files, by their names without .diff, or of all."""
    every = sorted(path.stem for path in FOLDER.glob("*.diff"))
    return {name: list(read((FOLDER / f"{name}.diff").read_text())) for name in names or every}


def read(text: str) -> Iterator[Mutation]:
    """Read the mutations of a file."""
    for group in text.split("\n@@ ")[1:]:
        head, *mutations = group.split("\n# ")
        path, file = head.split()
        for mutation in mutations:
            first, *lines = mutation.splitlines()
            why, _, names = first.partition(" :: ")
            tests = [name if "/" in name else f"{file}::{name}" for name in names.split()] or [file]
            before, after = ("\n".join(line[1:] for line in lines if line[:1] == sign) for sign in "-+")
            yield Mutation(path, before, after, why, " ".join(tests))


TOKEN = re.compile(r"\w+|[^\w\s]")


def pattern_of(code: str) -> re.Pattern[str]:
    """Match `code` with any white space between its tokens, and with or without a comma before a closing bracket."""
    tokens = list(TOKEN.finditer(code))
    pieces = [re.escape(tokens[0][0])]
    for before, token in itertools.pairwise(tokens):
        is_apart = before[0][-1].isalnum() and token[0][0].isalnum()
        closes = token[0] in ")]}" and before[0] != ","
        pieces += [r"\s+" if is_apart else r",?\s*" if closes else r"\s*", re.escape(token[0])]
    return re.compile("".join(pieces))


def mutated(mutation: Mutation, source: str) -> str:
    """Put the mutation into `source`, at the indentation of the code that it replaces.

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
