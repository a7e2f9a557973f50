"""Config objects of a model's own: models that are built from one config share it; patching and quantizing change it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeAlias

from torch import nn
from transformers import PreTrainedConfig

Copies: TypeAlias = list[tuple[PreTrainedConfig, PreTrainedConfig]]  # (the shared config, the model's own copy of it)


def _with_sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _with_sub_configs(value)


def _own(config: PreTrainedConfig, copies: Copies) -> PreTrainedConfig:
    if any(config is own for _, own in copies):
        return config
    memo: dict = {id(own): own for _, own in copies}
    memo |= {id(shared): own for shared, own in copies}
    own = copy.deepcopy(config, memo)
    for shared in _with_sub_configs(config):
        own_part = memo[id(shared)]
        if not any(own_part is known for _, known in copies):
            copies.append((shared, own_part))
    return own


def use_own_configs(model: nn.Module, copies: Copies) -> None:
    """Replace every config in the model's modules by a copy that no other model has.

    copies: those made before, to which new ones are added: modules of the model that come later, such as the model around
        an inner one, get the same.
    """
    for module in model.modules():
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, PreTrainedConfig):
                attributes[name] = _own(value, copies)
