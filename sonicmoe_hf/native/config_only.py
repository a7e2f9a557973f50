"""A model built from its config.json alone: on the meta device, without weights, prompts or code of the checkpoint."""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    __version__,
)
from transformers.utils import logging

from ..errors import CheckpointError, DoctorError
from ..patching.support import find_layers, supported_layers, supports
from ..private.transformers import builds
from .files import CONFIG_FILE, read_json
from .hub import local_folder
from .modeling import sizes_of

MAX_COUNT = 10_000  # layers, experts: far more than any model has, and few enough to build
COUNTS = re.compile(r"(layers|experts|depth)$")
IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # may name a kernel of the hub: code
UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


class _Contradiction(ValueError):
    """Entries with which a model can be built, but cannot compute anything; the message names them."""


def without_code(entries):
    """A config's entries without those that have Transformers run code which comes with a checkpoint or from the hub."""
    if isinstance(entries, list):
        return [without_code(entry) for entry in entries]
    if not isinstance(entries, dict):
        return entries
    return {
        key: without_code(value)
        for key, value in entries.items()
        if key != "auto_map" and not IMPLEMENTATIONS.fullmatch(key)
    }


def build_on_meta(name: str) -> PreTrainedModel:
    """The modules of a hub model or a local folder, with weights that take no memory. Only its config.json is read.

    Raises:
        DoctorError: no such folder, the hub cannot be reached, or config.json describes no model that can be built.
    """
    try:
        path = local_folder(name, only=[CONFIG_FILE]) / CONFIG_FILE
        entries = read_json(path)
    except CheckpointError as error:
        raise DoctorError(str(error)) from error
    _check_model_type(path, entries)
    for keys, value in _leaves(entries):
        if isinstance(value, int) and COUNTS.search(keys[-1]) and not 0 <= value <= MAX_COUNT:
            raise DoctorError(f"{path}: {'.'.join(keys)} is {value}; 0 to {MAX_COUNT} are built")
    try:
        return _build(entries)
    except UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, (StrictDataclassFieldValidationError, _Contradiction)):  # these name the entry
            reason += _suspects(entries)
        raise DoctorError(f"{path} describes no model that Transformers {__version__} can build: {reason}") from error


def _check_model_type(path: Path, entries: dict) -> None:
    model_type = entries.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    reason = f"{path}: model_type is {model_type!r}, which Transformers {__version__} does not know"
    if "auto_map" in entries:
        reason += "; its code comes with the checkpoint (auto_map), and is not run here"
    raise DoctorError(reason)


def _build(entries: dict) -> PreTrainedModel:
    """The model, after a look at what building it does not check. Changes nothing in `entries`."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        config = CONFIG_MAPPING[entries["model_type"]].from_dict(without_code(copy.deepcopy(entries)))
        for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
            if builds(auto_class, config):
                with torch.device("meta"):
                    model = auto_class.from_config(config, trust_remote_code=False)
                _check_layers(model)
                return model
    finally:
        logging.set_verbosity(verbosity)
    raise ValueError(f"no model class belongs to model_type {entries['model_type']!r}")


def _check_layers(model: PreTrainedModel) -> None:
    """Raise where the layers that were built could not compute anything."""
    for layer in supported_layers(model, supports(model), "accelerated"):
        sizes = sizes_of(layer.experts)
        if min(sizes.num_experts, sizes.hidden, sizes.intermediate) < 1:
            raise ValueError(f"the experts of {layer.name} would have the sizes {tuple(sizes[:3])}")
    config = model.config.get_text_config()
    top_k = getattr(config, "num_experts_per_tok", None)
    for layer in find_layers(model):
        num_experts: Any = getattr(layer.experts, "num_experts", None)
        if isinstance(num_experts, int) and top_k is not None and not 1 <= top_k <= num_experts:
            raise _Contradiction(f"num_experts_per_tok is {top_k}, but there are {num_experts} experts")
        if layer.router is not None:
            _check_router(layer.router, num_experts)


def _check_router(router: Any, num_experts: int) -> None:
    if hasattr(router, "num_group"):  # DeepSeek's, which adds up the two best scores of every group
        n_group = router.num_group
        if not isinstance(n_group, int) or not 1 <= n_group <= num_experts // 2 or num_experts % n_group:
            raise _Contradiction(
                f"n_group is {n_group!r}; {num_experts} experts make no such number of groups of 2 or more"
            )
    with torch.no_grad():
        router(router.weight.new_empty(1, router.weight.shape[1]))


def _leaves(entries: dict, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every entry that holds no others, as (its keys from the outermost in, its value)."""
    for key, value in entries.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*keys, key))
        else:
            yield (*keys, key), value


def _suspects(entries: dict) -> str:
    """The entries without any one of which, so by its default, the model could be built."""
    suspects = []
    for keys, value in _leaves(entries):
        changed = copy.deepcopy(entries)
        holder = changed
        for key in keys[:-1]:
            holder = holder[key]
        del holder[keys[-1]]
        try:
            _build(changed)
        except UNREADABLE:
            continue
        suspects.append(f"{'.'.join(keys)}, which is {reprlib.repr(value)}")
    return f"; look at {', or '.join(suspects)}" if suspects else ""
