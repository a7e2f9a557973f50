"""The hook of each model that contains patched experts, which checks that its calls reach them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..attention.boundaries import LENGTHS, check_rows
from ..private import attributes
from ..private.torch import guard_module_hooks
from .beside_bitsandbytes import warn_of_dense_experts, warn_of_linear_layers_on_cpus
from .moe_layers import experts_and_wrappers, is_replica, models_with_experts
from .support import undo_liger_and_check

logger = logging.getLogger(__name__)
INPUTS = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}
OF_ROWS = set(LENGTHS)
OF_TRANSFORMERS = ("transformers.", f"{__name__.partition('.')[0]}.")  # modules of classes whose forwards are known
IGNORED = (
    "sonicmoe_hf: {model} takes no {names}, and ignores what it gets: load the class that the checkpoint's "
    "`architectures` names, as sonicmoe_hf.from_pretrained does, such as by AutoModelForImageTextToText"
)


class ExpertsGuard:
    """Forward pre-hook of a model that contains experts. In each call it

    - warns, once, of images and sounds that a text model takes as keyword arguments and ignores;
    - raises ValueError for packed sequences that the model's layers would mix;
    - looks whether a forward of the experts was replaced, of which compiled calls can only raise an error.

    At the first call, and wherever a forward was replaced, it

    - undoes Liger's and checks that sonicmoe_hf computes the experts, because quantizers, use_kernels and parallelism may
      have changed them since patching;
    - warns of experts that bitsandbytes left dense, and of its linear layers on CPUs;
    - takes the forwards that the experts have then for those that they are to have.

    own_configs: what `use_own_configs` remembers of the model. Copies and pickles begin anew.
    """

    def __init__(self) -> None:
        guard_module_hooks()
        self.own_configs: dict[int, Any] = {}
        # experts and wrappers, with a forward of their own
        self.forwards: list[tuple[nn.Module, Callable | None]] = []
        self.is_checked = False
        self.has_warned = False

    def __reduce__(self):
        return type(self), ()

    def watch(self, model: nn.Module) -> None:
        """Take the forwards that the model's experts have now for those that they are to have."""
        self.forwards = [(module, vars(module).get("forward")) for module in experts_and_wrappers(model)]

    def __call__(self, model: nn.Module, args, kwargs) -> None:
        if not (INPUTS.isdisjoint(kwargs) or self.has_warned):
            self._warn_of_ignored(model, kwargs)
        if args or kwargs.get("position_ids") is not None or not OF_ROWS.isdisjoint(kwargs):
            check_rows(model, args, kwargs)
        is_replaced = False
        for module, forward in self.forwards:
            is_replaced = is_replaced or module.__dict__.get("forward") is not forward
        if torch.compiler.is_compiling():
            if is_replaced:
                raise RuntimeError(
                    "another forward took the place of these experts' own: call sonicmoe_hf.patch_model(model) again"
                )
        elif is_replaced or not self.is_checked:
            undo_liger_and_check(model)
            warn_of_dense_experts(model)
            warn_of_linear_layers_on_cpus(model)
            if not is_replica(model):  # one would live on here, with its weights
                self.watch(model)
                self.is_checked = True

    def _warn_of_ignored(self, model: nn.Module, kwargs: dict) -> None:
        given = tuple(sorted(name for name in INPUTS if kwargs.get(name) is not None))
        if _warn_of_inputs(type(model), given) and not torch.compiler.is_compiling():
            for guard in guards_of(model):  # models inside, which get the same
                guard.has_warned = True


@torch.compiler.assume_constant_result  # which is called while a graph is traced, not in it
def _warn_of_inputs(model_class: type[nn.Module], given: tuple[str, ...]) -> bool:
    """Warn of inputs that a class of Transformers takes among its keyword arguments alone, and ignores, and tell whether
    there are any. What a class of somebody else's makes of those is not known."""
    if not model_class.forward.__module__.startswith(OF_TRANSFORMERS):
        return False
    named = inspect.signature(model_class.forward).parameters
    if ignored := [name for name in given if name not in named]:
        logger.warning(IGNORED.format(model=model_class.__name__, names=" and ".join(ignored)))
    return bool(ignored)


def guard_of(model: nn.Module) -> ExpertsGuard | None:
    """Find the guard of a patched model, or of the first one in it; None where none is patched."""
    return next(guards_of(model), None)


def guards_of(model: nn.Module) -> Iterator[ExpertsGuard]:
    """Yield the guards of a model and of those in it."""
    guards = (vars(module).get(attributes.GUARD) for module in model.modules())
    yield from (guard[0] for guard in guards if guard is not None)


def install_guards(model: nn.Module, own_configs: dict[int, Any]) -> None:
    """Guard every model that contains experts, or have those that are guarded watch the experts' forwards of now."""
    for module in models_with_experts(model):
        if attributes.GUARD not in vars(module):
            guard = ExpertsGuard()
            vars(module)[attributes.GUARD] = guard, module.register_forward_pre_hook(guard, with_kwargs=True)
        guard = vars(module)[attributes.GUARD][0]
        guard.own_configs = own_configs
        guard.watch(module)


def remove_installed(model: nn.Module, attribute: str) -> None:
    """Remove GUARD's or HOOK's objects (private/attributes.py) from a model and all modules in it."""
    for module in model.modules():
        _, *handles = vars(module).pop(attribute, (None,))
        for handle in handles:
            handle.remove()
