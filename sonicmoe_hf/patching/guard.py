"""The hook of each model that contains patched experts, which checks that its calls reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..private import attributes
from ..private.torch import guard_module_hooks
from .support import experts_and_wrappers, is_replica, models_with_experts, undo_liger_and_check
from .unpacked import warn_of_dense_experts


class ExpertsGuard:
    """Forward pre-hook of a model that contains experts.

    It checks that sonicmoe_hf computes them at the first call, because quantizers, use_kernels, parallelism and Liger may
    have changed them since patching, and again wherever a forward of the experts was replaced. Compiled calls can only
    raise an error then.

    own_configs: what `use_own_configs` remembers of the model. Copies and pickles begin anew.
    """

    def __init__(self) -> None:
        guard_module_hooks()
        self.own_configs: dict[int, Any] = {}
        # experts and wrappers, with a forward of their own
        self.forwards: list[tuple[nn.Module, Callable | None]] = []
        self.is_checked = False

    def __reduce__(self):
        return type(self), ()

    def watch(self, model: nn.Module) -> None:
        """Take the forwards that the model's experts have now for those that they are to have."""
        self.forwards = [(module, vars(module).get("forward")) for module in experts_and_wrappers(model)]

    def __call__(self, model: nn.Module, args) -> None:
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
            if not is_replica(model):  # one would live on here, with its weights
                self.watch(model)
                self.is_checked = True


def guard_of(model: nn.Module) -> ExpertsGuard | None:
    """Find the guard of a patched model, or of the first one in it; None where none is patched."""
    found = (vars(module).get(attributes.GUARD) for module in model.modules())
    return next((guard[0] for guard in found if guard is not None), None)


def install_guards(model: nn.Module, own_configs: dict[int, Any]) -> None:
    """Guard every model that contains experts, or have those that are guarded watch the experts' forwards of now."""
    for module in models_with_experts(model):
        if attributes.GUARD not in vars(module):
            guard = ExpertsGuard()
            vars(module)[attributes.GUARD] = guard, module.register_forward_pre_hook(guard)
        guard = vars(module)[attributes.GUARD][0]
        guard.own_configs = own_configs
        guard.watch(module)


def remove_guards(model: nn.Module) -> None:
    """Remove the guards of a model, and of those in it."""
    for module in model.modules():
        _, *handles = vars(module).pop(attributes.GUARD, (None,))
        for handle in handles:
            handle.remove()
