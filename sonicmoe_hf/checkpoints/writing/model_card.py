"""The model card of a folder that is written, README.md: its base, its adapter, versions, and what rounding lost."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCard

from ...private.versions import versions
from .rounding_effects import DITHERED

CARD = "README.md"
TAG = "sonicmoe_hf"
NO_HEADER = "---\n{}\n---\n"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
AS_IT_IS = "surrogateescape"  # of bytes that are no UTF-8
VERSIONS = ("torch", "transformers", "peft")
HEADING = "## How these files were made"
SECTION = """
{heading}

By `sonicmoe-hf {command}` of sonicmoe_hf {version} ({others}).

{lines}
{check}"""
CHECK = """
Whether they compute what was trained (give folders with their paths):

    sonicmoe-hf check {base} {adapter} {name}{options}
"""


class Origin(NamedTuple):
    """The source of a folder: the command that writes it, and folders or hub ids of the base and the adapter.

    experts_quantization: by which the base was loaded to train the adapter, where it is stored otherwise.
    """

    command: str
    base: str
    adapter: str | None = None
    experts_quantization: str | None = None

    @property
    def base_on_the_hub(self) -> str | None:
        """The base's id, where it is no folder here."""
        return self.base if HUB_ID.fullmatch(self.base) and not Path(self.base).exists() else None


def public_name(name: str) -> str:
    """Shorten a hub id or folder to what may be public: a folder's name without the path to it, which may hold what is
    private."""
    return Path(name).absolute().name if Path(name).exists() else name


def add_card(folder: Path, name: str, origin: Origin, format: str, notices: list[str]) -> None:
    """Add a section to README.md of `folder`, or write one, and what it lacks of the hub's metadata. What stands there
    stays.

    Args:
        folder: where the files are written. name: of the folder that they will be in. format: of the result, in words.
        notices: what else there is to say of it, in sentences.
    """
    path = folder / CARD
    text = path.read_text("utf-8", AS_IT_IS) if path.is_file() else f"# {name}\n"
    text = _rename_title(_with_metadata(text, origin), name, origin)
    path.write_text(text.rstrip("\n") + "\n" + _section(name, origin, format, notices), "utf-8", AS_IT_IS)


def _rename_title(text: str, name: str, origin: Origin) -> str:
    """Put the new folder's name in its title, where a card that was written here has its source's."""
    if HEADING not in text:
        return text
    titles = (f"# {Path(source).name}" for source in (origin.base, origin.adapter) if source)
    return re.sub(f"^({'|'.join(map(re.escape, titles))})$", lambda _: f"# {name}", text, count=1, flags=re.MULTILINE)


def _section(name: str, origin: Origin, format: str, notices: list[str]) -> str:
    installed = versions()
    lines = [f"base: {public_name(origin.base)}", f"format: {format}"]
    check = ""
    if origin.adapter is not None:
        lines.insert(1, f"adapter: {public_name(origin.adapter)}")
        quantization = origin.experts_quantization
        options = "" if quantization is None else f" --experts-quantization {quantization}"
        check = CHECK.format(
            base=public_name(origin.base), adapter=public_name(origin.adapter), name=name, options=options
        )
    paths = {str(Path(each).absolute()): public_name(each) for each in (origin.base, origin.adapter) if each}
    for notice in notices:
        for path, short in paths.items():
            notice = notice.replace(path, short)
        lines.append(notice)
    others = ", ".join(f"{package} {installed[package]}" for package in VERSIONS)
    listed = "\n".join(f"- {line}" for line in lines)
    return SECTION.format(
        heading=HEADING,
        command=origin.command,
        version=installed["sonicmoe-hf"],
        others=others,
        lines=listed,
        check=check,
    )


def _with_metadata(text: str, origin: Origin) -> str:
    """Add to a card the tags and the base model that it lacks; a header that is no metadata stays as it is."""
    has_header = text.lstrip().startswith("---")
    try:
        card: Any = ModelCard(text if has_header else NO_HEADER + text)
    except (ValueError, TypeError, yaml.YAMLError):
        return text
    tags = [card.data.tags] if isinstance(card.data.tags, str) else list(card.data.tags or [])
    lacking = [tag for tag in ([TAG] if origin.adapter is None else [TAG, "peft"]) if tag not in tags]
    base = None if card.data.base_model else origin.base_on_the_hub
    if not lacking and base is None:
        return text
    card.data.tags = tags + lacking
    card.data.base_model = base or card.data.base_model
    return card.content


def is_dithered(folder: Path) -> bool:
    """Tell whether the card of a folder that was written here says that weights were rounded by a dither."""
    path = folder / CARD
    text = path.read_text("utf-8", AS_IT_IS) if path.is_file() else ""
    return DITHERED in text.partition(HEADING)[2]


def origin_of(
    command: str,
    base: str | os.PathLike,
    adapter: str | os.PathLike | None = None,
    experts_quantization: str | None = None,
) -> Origin:
    """Make an Origin of paths or hub ids."""
    return Origin(command, os.fspath(base), None if adapter is None else os.fspath(adapter), experts_quantization)
