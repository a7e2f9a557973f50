"""The base that an adapter names, beside the model that gets it: another may fit by its shapes alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..model_patches import NATIVE_PREFIX

logger = logging.getLogger(__name__)
OTHER = (
    "the adapter was trained on {named}, of the family {trained}, and {model} is of {here}: its shapes fit, but it "
    "computes something else there; name its own base"
)
OTHER_NAME = (
    "the adapter names {named} as its base, and was merged into {given}; if these are two models, merge it into the base "
    "that it names"
)
_said: set[str] = set()


def other_family(named: str | None, config: Mapping[str, Any], model_name: str) -> str | None:
    """Tell, in a sentence, that a model is of another family than the base that an adapter names; None if not, or where
    that base's config is neither in a folder nor in the hub's cache.

    Args:
        named: the adapter's base_model_name_or_path. config: the model's. model_name: what to call it.
    """
    if not named:
        return None
    try:
        trained, here = (_families(each) for each in (config_of(named), config))
    except (OSError, ValueError):
        return None
    if not trained or not here or trained & here:
        return None
    return OTHER.format(named=named, trained=min(trained, key=len), model=model_name, here=min(here, key=len))


def other_name(named: str | None, given: str, config: Mapping[str, Any]) -> str | None:
    """Tell, in a sentence, that a model has another name than the base that an adapter names; None where the names end
    alike, as those of copies do, or where one of the two is in the native layout, which has names of its own.

    Args:
        named, config: as `other_family` has them. given: the model's hub id or folder.
    """
    if not named or _last(named) == _last(given):
        return None
    try:
        if _is_native(config_of(named)) != _is_native(config):
            return None
    except (OSError, ValueError):  # of that base nothing but its name is here
        pass
    return OTHER_NAME.format(named=named, given=given)


def warn_of_other_family(config: Any, model: nn.Module) -> None:
    """Warn, once, that PEFT puts an adapter on a model of another family than its base."""
    own = getattr(model, "config", None)
    if not isinstance(own, PreTrainedConfig):
        return
    sentence = other_family(config.base_model_name_or_path, own.to_dict(), f"this {type(model).__name__}")
    if sentence is not None and sentence not in _said:
        _said.add(sentence)
        logger.warning(f"sonicmoe_hf: {sentence}")


def config_of(named: str) -> dict[str, Any]:
    """Read the config of a model in a folder, or in the hub's cache; raises OSError or ValueError where it has none."""
    return PreTrainedConfig.get_config_dict(named, local_files_only=True)[0]


def _last(name: str) -> str:
    path = Path(name).expanduser()
    return (path.resolve() if path.is_dir() else path).name.lower()


def _is_native(config: Mapping[str, Any]) -> bool:
    return str(config.get("model_type")).startswith(NATIVE_PREFIX)


def _families(config: Mapping[str, Any]) -> set[str]:
    """Read the model_type of a config and of its text model's, without the prefix of the native layout."""
    types = (each.get("model_type") for each in (config, config.get("text_config") or {}))
    return {str(each).removeprefix(NATIVE_PREFIX) for each in types if each}
