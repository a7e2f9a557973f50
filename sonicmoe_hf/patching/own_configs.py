"""Config objects of a model's own: models that are built from one config share it; patching and quantizing change it."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig


def use_own_configs(model: nn.Module, copies: dict[int, Any]) -> None:
    """Replace every config in the model's modules by a copy that no other model has. Modules that shared a config share
    its copy.

    copies: what deepcopy remembers of earlier calls: modules of the model that come later, such as the model around an
        inner one, get the same.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)
    copies.update({id(own): own for own in list(copies.values())})  # which are not copied again
