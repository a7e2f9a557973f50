"""The register of all functions of other packages that sonicmoe_hf has replaced. docs/patching.md has the list for
users."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

# who replaces a function: the package, or the command, which may replace functions of the package too
OURS, RUN = "sonicmoe_hf", "sonicmoe-hf run"


class Replaced(NamedTuple):
    """A function of another package: the module or class that has it, its name there, itself, ours, and who put that
    there."""

    owner: Any
    name: str
    original: Any
    ours: Any
    by: str = OURS


REPLACED: list[Replaced] = []


def is_replaced(owner: Any, name: str, by: str = OURS) -> bool:
    """Tell whether `replace` was called for this function."""
    return any(each.owner is owner and (each.name, each.by) == (name, by) for each in REPLACED)


def replace(owner: Any, name: str, ours: Any, by: str = OURS) -> None:
    """Put `ours`, which calls the original for everybody else, in the place of a function; once."""
    if not is_replaced(owner, name, by):
        REPLACED.append(Replaced(owner, name, inspect.getattr_static(owner, name), ours, by))
        setattr(owner, name, ours)


def put_back(*function: Any) -> None:
    """Put an original (owner, name) back, or all of them, those of `sonicmoe-hf run` too, unless another package has
    since put a function of its own in the place of ours."""
    taken = [each for each in REPLACED if not function or (each.owner, each.name, each.by) == (*function, OURS)]
    for each in reversed(taken):
        REPLACED.remove(each)
        if inspect.getattr_static(each.owner, each.name) is each.ours:
            setattr(each.owner, each.name, each.original)


@contextlib.contextmanager
def temporarily_replaced(owner: Any, name: str, ours: Any) -> Iterator[Any]:
    """Put `ours` in the place of a function inside the `with`; yields what was there."""
    entry = Replaced(owner, name, vars(owner)[name], ours)
    REPLACED.append(entry)
    setattr(owner, name, ours)
    try:
        yield entry.original
    finally:
        if entry in REPLACED:  # else put_back was called meanwhile
            REPLACED.remove(entry)
        setattr(owner, name, entry.original)
