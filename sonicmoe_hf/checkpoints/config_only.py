"""A model built from its config.json alone: on the meta device, without weights, prompts or code of the checkpoint."""

from __future__ import annotations

import re
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
from transformers.utils import logging

from ..errors import CheckpointError
from ..formats.declared import MODELOPT_FILE, declared_quantization
from ..patching.support import find_layers
from ..private.transformers import auto_class_of
from .files import CONFIG_FILE, read_json
from .hub import local_folder

IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # may name a kernel of the hub: code
UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


def readable(entries):
    """A config's entries without those that have Transformers run code which comes with a checkpoint or from the hub, and
    with the floats that Transformers writes as objects, such as {"__float__": "Infinity"}."""
    if isinstance(entries, list):
        return [readable(entry) for entry in entries]
    if not isinstance(entries, dict):
        return entries
    if entries.keys() == {"__float__"}:
        return float(entries["__float__"])
    return {
        key: readable(value)
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
    entries = read_json(path)
    declared = declared_quantization(entries, folder, str(path))
    return build_from_config(
        entries if declared is None else {**entries, "quantization_config": declared.entries}, path
    )


def build_from_config(entries: dict, path: Path) -> PreTrainedModel:
    """`build_on_meta`, of the entries of the config.json at `path`.

    Raises:
        CheckpointError: they describe no model that can be built.
    """
    _check_model_type(path, entries)
    try:
        return _build(entries)
    except UNREADABLE as error:
        reason = " ".join([f"{type(error).__name__}:", *str(error).split()])
        raise CheckpointError(
            f"{path} describes no model that Transformers {__version__} can build: {reason}"
        ) from error


def _check_model_type(path: Path, entries: dict) -> None:
    model_type = entries.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    reason = f"{path}: model_type is {model_type!r}, which Transformers {__version__} does not know"
    if "auto_map" in entries:
        reason += "; its code comes with the checkpoint (auto_map), and is not run here"
    raise CheckpointError(reason)


def _build(entries: dict) -> PreTrainedModel:
    """The model, after a call of its routers: theirs are the entries that only a forward reads."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        config = CONFIG_MAPPING[entries["model_type"]].from_dict(readable(entries))
        with torch.device("meta"), torch.no_grad():
            model = _construct(entries, config)
            for layer in find_layers(model):
                router: Any = layer.router
                if router is not None:
                    router(router.weight.new_empty(1, router.weight.shape[1]))
        return model
    finally:
        logging.set_verbosity(verbosity)


def _construct(entries: dict, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of the class that `architectures` names, if Transformers has it for this config; else an Auto class's."""
    names = entries.get("architectures")
    for name in names if isinstance(names, list) else ():
        declared: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        if getattr(declared, "config_class", None) is type(config):
            return declared._from_config(config)
    auto_class = auto_class_of(config)
    if auto_class is None:
        raise ValueError(f"no model class belongs to model_type {entries['model_type']!r}")
    return auto_class.from_config(config, trust_remote_code=False)
