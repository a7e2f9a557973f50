"""The names under which PEFT loads an adapter's tensors again."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..formats.hub_names import HubNames
from .names import KEY, PREFIX


def names_that_are_loaded(model: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors of an adapter, as PEFT saves them of `model`, to names that it loads them by again."""
    if not isinstance(model, PreTrainedModel):
        return tensors
    hub_names, renamed = HubNames(model), {}
    for name, tensor in tensors.items():
        prefix = PREFIX if name.startswith(PREFIX) else ""
        if match := KEY.match(name.removeprefix(PREFIX)):
            module = match["module"]
            name = f"{prefix}{hub_names.in_adapter(module) or module}{name.removeprefix(prefix + module)}"
        renamed[name] = tensor
    return renamed
