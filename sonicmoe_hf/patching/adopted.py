"""Experts that have the shape of Transformers' experts interface, but whose class is not decorated for it.

A patched model's modules of such a class become instances of a subclass that is decorated. Other models keep the class.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import use_experts_implementation

from ..model_patches.family import modeling_module

CLASSES = {"Step3p7Experts": modeling_module("step3p7")}  # name of a class: its module

FLAGS = {  # that the decorator sets
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}


def is_adoptable(experts: nn.Module) -> bool:
    """Tell whether this is an instance of one of CLASSES, not yet of its decorated subclass."""
    return CLASSES.get(type(experts).__name__) == type(experts).__module__


@functools.cache
def _decorate(name: str) -> type[nn.Module]:
    """Make the class of CLASSES go through the experts interface."""
    cls = getattr(importlib.import_module(CLASSES[name]), name)
    return use_experts_implementation(type(cls.__name__, (cls,), {"__module__": __name__, "__doc__": cls.__doc__}))


def __getattr__(name: str) -> type[nn.Module]:
    """Find a decorated class by name, as unpickling does."""
    if name in CLASSES:
        return _decorate(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def adopt_experts(root: PreTrainedModel) -> None:
    """Bring the model's modules of these classes into the interface, with the config of the model that holds them."""
    configs: dict[nn.Module, Any] = {}
    for model in root.modules():
        if isinstance(model, PreTrainedModel):
            configs.update(dict.fromkeys(filter(is_adoptable, model.modules()), model.config.get_text_config()))
    for experts, config in configs.items():
        experts.__class__ = _decorate(type(experts).__name__)
        vars(experts).update(FLAGS, config=config)


def release_experts(root: nn.Module) -> None:
    """Undo `adopt_experts`."""
    for experts in root.modules():
        if type(experts).__module__ == __name__:
            experts.__class__ = type(experts).__bases__[0]
            for name in ("config", *FLAGS):
                del vars(experts)[name]
