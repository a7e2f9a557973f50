"""train() and parameters() of a model, which a Trainer calls at each step, as one loop over the modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .methods import WhileTraining

OWN_TRAIN = nn.Module.train, PreTrainedModel.train  # change nothing where all modules are in that mode


class ModuleWalks(WhileTraining):
    """Replaces train() and parameters() of a model that a Trainer trains, with the same results. `attach` adds it.

    A Trainer calls train(), zero_grad() and, to clip gradients, parameters() at each step. torch calls or resumes Python
    once for each module and each one above it: in twelve layers with adapters, which have 900 modules, for some 11 ms,
    while the GPU has nothing to do.
    """

    def __init__(self) -> None:
        self.model: Any = None

    def begin(self, args: Any, model: Any) -> None:
        """Replace the two methods of the model, where its classes have torch's and Transformers' own."""
        if not isinstance(model, nn.Module):
            return
        self.model = model
        classes = {type(module) for module in _modules(model)}
        if "train" not in vars(model) and all(each.train in OWN_TRAIN for each in classes):
            vars(model)["train"] = partial(_train, model)  # a partial is copied and pickled with its model
        if "parameters" not in vars(model) and all(_has_own_parameters(each) for each in classes):
            vars(model)["parameters"] = partial(_parameters, model)

    def end(self) -> None:
        """Take the methods back."""
        for name, ours in (("train", _train), ("parameters", _parameters)):
            if self.model is not None and getattr(vars(self.model).get(name), "func", None) is ours:
                del vars(self.model)[name]
        self.model = None


def _has_own_parameters(cls: type[nn.Module]) -> bool:
    names = "parameters", "named_parameters", "named_modules"
    return all(getattr(cls, name) is getattr(nn.Module, name) for name in names)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules as nn.Module.modules does, each once, in the same order."""
    seen, stack = set(), [model]
    while stack:
        module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            stack += [child for child in reversed(module._modules.values()) if child is not None]


def _parameters(model: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Iterate over the parameters as nn.Module.parameters does, each once, in the same order."""
    seen = set()
    for module in _modules(model) if recurse else (model,):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _train(model: nn.Module, mode: bool = True) -> nn.Module:
    """Set the mode of all modules as nn.Module.train does, unless all are in it already."""
    if all(module.training is mode for module in _modules(model)):
        return model
    return type(model).train(model, mode)
