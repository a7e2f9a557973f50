"""The files that are copied beside weights which are written anew: tokenizer, chat templates, code, licences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckpointError
from ...formats.json_files import read_json
from ..reading.files import WEIGHTS

COPIED_FOLDERS = ("chat_templates", "additional_chat_templates")
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER = re.compile(
    r"tokenizer(_config)?\.json|[^/]+\.(model|tiktoken)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|tokenization_\w+\.py"
)
TEMPLATE = re.compile(r"chat_template\.(jinja|json)|(additional_)?chat_templates/.+")
OF_TRAINING = (  # patterns of files to download of an adapter
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tokenization_*.py",
    "chat_template*",
    "additional_chat_templates/*",
)


class Companions(NamedTuple):
    """The files beside weights. sources: by the path in the new folder. notices: sentences for the user."""

    sources: dict[Path, Path]
    notices: list[str]


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds a tokenizer."""
    return any(folder.glob("tokenizer*"))


def companions(folder: Path, own: set[str], adapter: Path | None = None) -> Companions:
    """Find the files of a folder to copy beside weights that are written anew.

    Args:
        own: the names of what is written anew. adapter: a folder whose tokenizer and chat template, where it has
            them, take the place of those of `folder`: the model was trained with them.
    Raises:
        CheckpointError: one is a link to outside its folder.
    """
    files, skipped = _list_files(folder, own)
    sources = {file: folder / file for file in files}
    notices = [f"not carried over: {', '.join(skipped)}"] if skipped else []
    if adapter is not None:
        replaced = _with_adapters(sources, adapter)
        names = sorted(file.as_posix() for file in sources.keys() | replaced if _differs(file, sources, replaced))
        if names and any(_is_of_tokenizer(file) for file in sources):
            notices.append(f"tokenizer and chat template are the adapter's; the base's differ in {', '.join(names)}")
        sources = replaced
    for file, path in sources.items():
        _check_link_inside(path, path.parents[len(file.parts) - 1])
    return Companions(sources, notices)


def _with_adapters(sources: dict[Path, Path], adapter: Path) -> dict[Path, Path]:
    """Put an adapter's tokenizer in the place of the base's, and its chat template."""
    files, _ = _list_files(adapter, set())
    has_template = any(TEMPLATE.fullmatch(file.as_posix()) for file in files) or (
        (adapter / TOKENIZER_CONFIG).is_file() and bool(read_json(adapter / TOKENIZER_CONFIG).get("chat_template"))
    )
    for pattern, is_there in ((TOKENIZER, has_tokenizer(adapter)), (TEMPLATE, has_template)):
        if is_there:
            kept = {file: path for file, path in sources.items() if not pattern.fullmatch(file.as_posix())}
            sources = kept | {file: adapter / file for file in files if pattern.fullmatch(file.as_posix())}
    return sources


def _is_of_tokenizer(file: Path) -> bool:
    return any(pattern.fullmatch(file.as_posix()) for pattern in (TOKENIZER, TEMPLATE))


def _differs(file: Path, one: dict[Path, Path], other: dict[Path, Path]) -> bool:
    """Tell whether a file is in one alone, or holds something else there."""
    paths = one.get(file), other.get(file)
    if paths[0] is None or paths[1] is None:
        return True
    return paths[0] != paths[1] and paths[0].read_bytes() != paths[1].read_bytes()


def _list_files(folder: Path, own: set[str]) -> tuple[list[Path], list[str]]:
    """List files of a folder to copy, and names of those that are left: other weights, unknown folders."""
    files, skipped = [], []
    for path in sorted(folder.iterdir()):
        if path.name in own or path.name.startswith("."):
            continue
        if path.is_dir() and path.name in COPIED_FOLDERS:
            files += [file.relative_to(folder) for file in sorted(path.rglob("*")) if file.is_file()]
        elif path.is_file() and not WEIGHTS.search(path.name):
            files.append(Path(path.name))
        else:
            skipped.append(path.name)
    return files, skipped


def _check_link_inside(file: Path, folder: Path) -> None:
    """Raise CheckpointError where `file`, in `folder`, is a link to what is neither in the folder nor, if this
    is a snapshot in the hub's cache, among the blobs of its repository."""
    target, folder = file.resolve(), folder.resolve()
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(target.is_relative_to(root) for root in (folder, *blobs)):
        raise CheckpointError(
            f"{file} is a link to {target}, outside of {folder}; put a copy in its place, or remove the link"
        )
