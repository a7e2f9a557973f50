"""Config objects of a model's own: models that are built from one config share it, and patching changes it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

from .calls import PatchState


def _with_sub_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _with_sub_configs(value)


def _own(config: PreTrainedConfig, state: PatchState) -> PreTrainedConfig:
    if any(config is own for _, own in state.configs):
        return config
    memo: dict = {id(own): own for _, own in state.configs}
    memo |= {id(shared): own for shared, own in state.configs}
    own = copy.deepcopy(config, memo)
    for shared in _with_sub_configs(config):
        own_part = memo[id(shared)]
        if not any(own_part is known for _, known in state.configs):
            state.configs.append((shared, own_part))
    return own


def use_own_configs(model: nn.Module, state: PatchState) -> None:
    """Replace every config in the model's modules by a copy that no other model has. `state` notes the copies: modules
    of the model that come later, such as the model around an inner one, get the same."""
    for module in model.modules():
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, PreTrainedConfig):
                attributes[name] = _own(value, state)
