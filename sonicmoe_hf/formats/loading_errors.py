"""Errors of from_pretrained that name the weight or the folder; Transformers' own, in whose place they come, name
neither."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import torch
from huggingface_hub import constants
from safetensors import SafetensorError

from ..errors import CheckpointError
from ..layer.holding import local_shape
from .tensor_files import open_tensors

_errors: ContextVar[list[Exception] | None] = ContextVar("errors of conversions while a model is loaded", default=None)


def keeping_errors(convert: Callable) -> Callable:
    """Keep the ValueErrors of a conversion: Transformers prints them in a report and raises one that names nothing."""

    @functools.wraps(convert)
    def run(*args, **kwargs):
        try:
            return convert(*args, **kwargs)
        except ValueError as error:
            errors = _errors.get()
            if errors is not None:
                errors.append(error)
            raise

    return run


def check_shape(name: str, stored: tuple[int, ...], dense: torch.Tensor) -> None:
    """Raise ValueError where a weight that a checkpoint brings has another shape than `dense`, the model's parameter, or
    this rank's share of it. Transformers does not compare the shapes of what a quantizer takes."""
    shape = local_shape(dense)
    if stored != shape:
        raise ValueError(f"{name} has shape {tuple(stored)} in the checkpoint; the model's is {tuple(shape)}")


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


@contextlib.contextmanager
def named_errors() -> Iterator[None]:
    """Surround the loading of a model. Raises CheckpointError in the place of Transformers' error."""
    errors: list[Exception] = []
    token = _errors.set(errors)
    try:
        yield
    except RuntimeError as error:
        if not errors:
            raise
        more = f" (and {len(errors) - 1} more weights)" if len(errors) > 1 else ""
        raise CheckpointError(f"{errors[0]}{more}") from error
    finally:
        _errors.reset(token)
