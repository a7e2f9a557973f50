"""A model built from its config.json alone: on the meta device, without weights, prompts or code of the checkpoint."""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers.utils import logging

from ..errors import CheckpointError
from ..formats.declared import declared_quantization
from ..patching.experts import sizes_of
from ..patching.support import find_layers, supported_layers, supports
from ..private.transformers import auto_classes, builds
from .files import CONFIG_FILE, read_json
from .hub import local_folder

MAX_COUNT = 10_000  # layers, experts: far more than any model has
MAX_MODULES = 50_000  # a quarter of a minute; models on the hub have up to 10,000
COUNTS = re.compile(r"(layers?|experts|depths?|blocks?)$")
ASKED_FIRST = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModel)
IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # may name a kernel of the hub: code
UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


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
        CheckpointError: no such folder, the hub cannot be reached, or config.json describes no model that can be built.
    """
    path = local_folder(name, only=[CONFIG_FILE]) / CONFIG_FILE
    entries = read_json(path)
    declared_quantization(entries, where=str(path))  # where it is no object, Transformers' error would not name it
    return build_from_config(entries, path)


def build_from_config(entries: dict, path: Path) -> PreTrainedModel:
    """`build_on_meta`, of the entries of the config.json at `path`.

    Raises:
        CheckpointError: they describe no model that can be built.
    """
    _check_model_type(path, entries)
    _check_counts(path, entries)
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


def _check_counts(path: Path, entries: dict) -> None:
    """Raise where so many layers or experts are asked for, also as one number for each stage, that building hangs."""
    for keys, value in _leaves(entries):
        if not COUNTS.search(keys[-1]):
            continue
        many = [number for number in _numbers(value) if number > MAX_COUNT]
        negative = isinstance(value, int) and value < 0 and keys[-1].startswith(("n_", "num_"))
        if many or negative:
            raise CheckpointError(f"{path}: {'.'.join(keys)} is {reprlib.repr(value)}; 0 to {MAX_COUNT} are built")


def _numbers(value: object) -> list[int | float]:
    """The numbers that a value is or holds in lists."""
    if isinstance(value, list):
        return [number for entry in value for number in _numbers(entry)]
    return [value] if isinstance(value, (int, float)) else []


@contextmanager
def _at_most_max_modules(entries: dict) -> Iterator[None]:
    """Inside the block a model is built that has no more than MAX_MODULES modules, or ValueError is raised."""
    count = 0

    def counted(module, name, submodule):
        nonlocal count
        count += 1
        if count > MAX_MODULES:
            largest = sorted(_leaves(entries), key=lambda leaf: max(_numbers(leaf[1]), default=0), reverse=True)
            names = ", ".join(f"{'.'.join(keys)}, which is {reprlib.repr(value)}" for keys, value in largest[:3])
            raise ValueError(f"it has more than {MAX_MODULES} modules; look at its largest numbers: {names}")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _special_floats(entries):
    """A config's entries with the floats that Transformers writes as objects, such as {"__float__": "Infinity"}."""
    if isinstance(entries, list):
        return [_special_floats(entry) for entry in entries]
    if not isinstance(entries, dict):
        return entries
    if entries.keys() == {"__float__"} and entries["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(entries["__float__"])
    return {key: _special_floats(value) for key, value in entries.items()}


def _build(entries: dict) -> PreTrainedModel:
    """The model, after a look at what building it does not check. Changes nothing in `entries`."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        readable = _special_floats(without_code(copy.deepcopy(entries)))
        config = CONFIG_MAPPING[entries["model_type"]].from_dict(readable)
        with torch.device("meta"), _at_most_max_modules(entries):
            model = _construct(entries, config)
        _check_layers(model)
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
    for auto_class in dict.fromkeys([*ASKED_FIRST, *auto_classes()]):
        if builds(auto_class, config):
            return auto_class.from_config(config, trust_remote_code=False)
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
            raise ValueError(f"num_experts_per_tok is {top_k}, but there are {num_experts} experts")
        if layer.router is not None:
            _check_router(layer.router, num_experts)


def _check_router(router: Any, num_experts: int) -> None:
    topk_method = getattr(router, "topk_method", None)  # DeepSeek-V2's, whose routers may have no groups
    if hasattr(router, "num_group") and topk_method != "greedy":
        n_group = router.num_group
        smallest = 2 if topk_method is None else 1  # DeepSeek-V3 adds up the two best scores of every group
        if not isinstance(n_group, int) or not 1 <= n_group <= num_experts // smallest or num_experts % n_group:
            raise ValueError(
                f"n_group is {n_group!r}; {num_experts} experts make no such number of groups of {smallest} or more"
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
