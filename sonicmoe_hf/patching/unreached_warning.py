"""A warning for models that are asked for experts_implementation="sonicmoe_hf" and whose experts it cannot reach.

Transformers takes the name for any model and looks it up in classes of the experts interface alone; for others nothing of
ours is ever called. But torch tells when a module becomes part of another: when a model's layers do, they are looked at.
"""

from __future__ import annotations

import logging

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedModel

from ..layer.experts_module import IMPLEMENTATION
from ..private.transformers import experts_implementation
from .support import OUTSIDE, outside_interface

logger = logging.getLogger(__name__)
_said: set[type] = set()  # classes of layers


def _look(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if not isinstance(module, PreTrainedModel) or submodule is None:
        return
    if experts_implementation(module.config) != IMPLEMENTATION:
        return
    for layer in outside_interface(submodule).values():
        if type(layer) not in _said:
            _said.add(type(layer))
            logger.warning(f"sonicmoe_hf: {type(layer).__name__} of {type(module).__name__} {OUTSIDE}")


register_module_module_registration_hook(_look)
