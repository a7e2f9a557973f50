"""A model built from its config.json alone: on the meta device, without weights, prompts or code of the checkpoint."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.modeling_utils import set_zero3_state
from transformers.utils import logging

from ...errors import CheckpointError
from ...formats.declared import MODELOPT_FILE, declared_quantization
from ...private.transformers import auto_class_of
from .files import CONFIG_FILE, local_folder, read_config

IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # may name a kernel of the hub: code
_quiet = threading.Lock()  # of two threads, the second would take the first one's silence for the level to restore
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def plain_entries(entries):
    """Leave out a config's entries that have Transformers run code of a checkpoint or of the hub.

    Floats that it writes as objects, such as {"__float__": "Infinity"}, become floats."""
    if isinstance(entries, list):
        return [plain_entries(entry) for entry in entries]
    if not isinstance(entries, dict):
        return entries
    if entries.keys() == {"__float__"}:
        return float(entries["__float__"])
    return {
        key: plain_entries(value)
        for key, value in entries.items()
        if key != "auto_map" and not IMPLEMENTATIONS.fullmatch(key)
    }


def build_on_meta(name: str) -> PreTrainedModel:
    """Build the modules of a hub model or a local folder, with weights that take no memory.

    Of its files config.json is read, and ModelOpt's hf_quant_config.json, which becomes the config's quantization_config.

    Raises:
        CheckpointError: no such folder, the hub cannot be reached, or config.json describes no model that can be built.
    """
    folder = local_folder(name, only=[CONFIG_FILE, MODELOPT_FILE])
    path = folder / CONFIG_FILE
    entries = read_config(folder)
    declared = declared_quantization(entries, folder)
    if declared is not None:
        entries["quantization_config"] = declared.entries
    return build_from_config(entries, path)


def build_from_config(entries: dict, path: Path) -> PreTrainedModel:
    """Build the modules of the entries of the config.json at `path`, as `build_on_meta` does.

    Raises:
        CheckpointError: they describe no model that can be built.
    """
    if entries.get("model_type") not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{path}: model_type is {entries.get('model_type')!r}, which Transformers {__version__} does not know"
            + _remedy_for_unknown(entries)
        )
    try:
        model = _build(entries)
        model.config.name_or_path = str(path.parent)
        return model
    except UNREADABLE as error:
        reason = " ".join([f"{type(error).__name__}:", *str(error).split()])
        raise CheckpointError(
            f"{path} describes no model that Transformers {__version__} can build: {reason}"
        ) from error


def _remedy_for_unknown(entries: dict) -> str:
    """Say what to do with a model_type of the checkpoint's own, such as Kimi-K2's, whose class is DeepSeek-V3's."""
    for declared in _declared_classes(entries):
        known = declared.config_class.model_type
        return f"; it knows {declared.__name__}: in a local copy take auto_map out, and set model_type to {known!r}"
    if "auto_map" in entries:
        return (
            "; its code (auto_map) is not run here: load it with trust_remote_code=True, and ask sonicmoe_hf.supports"
        )
    return "; install a Transformers that does"


def _build(entries: dict) -> PreTrainedModel:
    with _quiet:
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            config = CONFIG_MAPPING[entries["model_type"]].from_dict(plain_entries(entries))
            # set_zero3_state: of weights that take no memory, ZeRO-3 would leave not even shapes
            with torch.device("meta"), torch.no_grad(), set_zero3_state():
                return _construct(entries, config)
        finally:
            logging.set_verbosity(verbosity)


def _declared_classes(entries: dict) -> Iterator[Any]:
    """Yield the classes of Transformers that `architectures` names."""
    for name in entries.get("architectures") or ():
        if hasattr(getattr(transformers, name, None), "config_class"):
            yield getattr(transformers, name)


def _construct(entries: dict, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of the class that `architectures` names where Transformers has it for this config, else an Auto
    class's."""
    for declared in _declared_classes(entries):
        if declared.config_class is type(config):
            return declared._from_config(config)
    return auto_class_of(config).from_config(config, trust_remote_code=False)
