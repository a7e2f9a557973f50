"""Errors of from_pretrained that say what a model's folder or hub id lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from safetensors import SafetensorError

from .tensor_files import open_tensors


@contextlib.contextmanager
def named_source(source) -> Iterator[None]:
    """Surround the loading of a model from a folder or hub id. Raises OSError, which says what `source` lacks, and
    CheckpointError, which names a safetensors file of it that is not whole."""
    try:
        yield
    except SafetensorError:  # names no file
        for file in sorted(Path(source).glob("*.safetensors")):
            open_tensors(file)
        raise
    except (OSError, ValueError) as error:
        is_config_there = not Path(source).is_dir() or (Path(source) / "config.json").is_file()
        if type(error) is not OSError and (type(error) is not ValueError or is_config_there):
            raise
        reason = " ".join(str(error).split())
        raise OSError(f"{_what_is_lacking(source)}: {reason}") from error


def _what_is_lacking(source) -> str:
    folder = Path(source)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            return f"{source} holds an adapter, whose base is read from where base_model_name_or_path says"
        if not (folder / "config.json").is_file():
            return f"{source} has no config.json, so it is no model's folder"
        return f"{source} has a config.json, but Transformers cannot load its weights"
    return not_there(source)


def not_there(source, enough: str = "") -> str:
    """Say that `source` is neither a folder nor what the hub has. enough: a sentence's end on which files would do."""
    remedy = "; unset HF_HUB_OFFLINE, or give a local folder" if constants.HF_HUB_OFFLINE else ""
    remedy = f"{remedy or '; give a local folder'}, {enough}" if enough else remedy
    return f"there is no folder {source}, and the hub did not give it{remedy}"
