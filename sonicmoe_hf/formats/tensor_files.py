"""Safetensors files: one that is missing, damaged or cut short is named in the error."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..errors import CheckpointError


def open_tensors(path: Path):
    """Open the safetensors file at `path`, whose tensors are mapped when they are asked for.

    Raises:
        CheckpointError: it is missing, damaged or cut short.
    """
    if not path.exists():
        pickles = path.with_suffix(".bin").name, WEIGHTS_NAME, WEIGHTS_INDEX_NAME  # of an adapter; of a model
        pickled = next((name for name in pickles if path.with_name(name).exists()), None)
        remedy = f", and {pickled} is not read: load it with PEFT or Transformers and save it again"
        raise CheckpointError(f"there is no {path}{remedy if pickled else ''}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
