"""Safetensors files: one that is missing, damaged or cut short is named in the error."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError


def open_tensors(path: Path):
    """Open the safetensors file at `path`, whose tensors are mapped when they are asked for.

    Raises:
        CheckpointError: it is missing, damaged or cut short.
    """
    if not path.exists():
        pickled = path.with_suffix(".bin")
        remedy = f", and {pickled.name} is not read: load it with PEFT or Transformers and save it again"
        raise CheckpointError(f"there is no {path}{remedy if pickled.exists() else ''}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
