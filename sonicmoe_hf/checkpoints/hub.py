"""The folder of a checkpoint: one that is given, or the copy that Hugging Face's cache has of a hub repository."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ..errors import CheckpointError
from ..formats.loading_errors import not_there
from .files import CONFIG_FILE, expanded

SECOND_COPIES = ["*/*.safetensors"]  # gpt-oss has its weights once more in original/
DOWNLOADED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "*.tiktoken", "LICENSE*"]


def local_folder(src: str | os.PathLike, revision: str | None = None, only: list[str] | None = None) -> Path:
    """Find the folder of a checkpoint; a hub id is downloaded into the hub's cache.

    Args:
        src: folder, or hub id. revision: of a hub id. only: patterns of the files to download; None is all that matter.
    Raises:
        CheckpointError: there is no such folder, and it is no hub id that can be reached.
    """
    path = expanded(src)
    if path.is_dir():
        return path.absolute()
    name = os.fspath(src)
    try:
        # it asks the hub once; hf_hub_download and Transformers ask six times, for 23 seconds, where nothing answers
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=only or DOWNLOADED, ignore_patterns=SECOND_COPIES
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        enough = f"of which {CONFIG_FILE} is enough" if only is not None and CONFIG_FILE in only else ""
        raise CheckpointError(f"{not_there(name, enough)}: {reason}") from error
