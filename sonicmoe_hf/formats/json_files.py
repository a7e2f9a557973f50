"""JSON files of checkpoints and adapters. An entry of another type than expected is named in the error with its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def read_json(path: Path, **types: type | tuple[type, ...]) -> dict:
    """Read the object in a JSON file.

    Args:
        types: the types of entries, where they are there and not null.
    Raises:
        CheckpointError: there is no such file, it cannot be read, or it or an entry has another type.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object, but {content!r:.80}; download it again")
    for entry, kind in types.items():
        check_type(content, entry, kind, path)
    return content


def check_type(entries: dict, entry: str, kind: type | tuple[type, ...], file: Path | str) -> None:
    """Raise CheckpointError where an entry of `file` is there and of none of these types. `true` is no
    number."""
    _check(entries.get(entry), entry, kind, file)


def check_items(entries: dict, entry: str, kind: type | tuple[type, ...], file: Path | str) -> None:
    """Raise CheckpointError where an item of a list, or a value of an object, that an entry of `file` holds is null or of
    none of these types."""
    held = entries.get(entry)
    items = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
    for at, item in items:
        _check(item, f"{entry}[{at!r}]", kind, file, may_be_null=False)


def _check(value: Any, name: str, kind: type | tuple[type, ...], file: Path | str, may_be_null: bool = True) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if (value is None and may_be_null) or (
        isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    ):
        return
    names = " or ".join(KINDS[each] for each in kinds)
    raise CheckpointError(f"{file}: {name} is {value!r:.80}, where {names} is expected")
