"""The forward that an experts module really runs: Transformers' experts interface, or what was put in its place."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from ..layer.experts_module import LIGER_SWITCH, why_replaced_by_liger
from .adopted import is_adoptable

LIGERS = "LigerExperts"  # its class
IS_OURS = "is_sonicmoe_hf"  # True, of a forward that calls sonicmoe_hf by itself: SonicMoEExperts'
PARALLEL = ("transformers.distributed.", "transformers.integrations.tensor_parallel.")


@use_experts_implementation
class _Example(nn.Module):
    """All classes of the experts interface share the code of their forward, and those without a gate of their own its
    `_apply_gate`."""

    def __init__(self, config):
        super().__init__()

    def forward(self):
        """Stand in for a forward that is never called."""


INTERFACE_CODE = _Example.forward.__code__
DEFAULT_APPLY_GATE: Callable = vars(_Example)["_apply_gate"]


def _name(function) -> str:
    function = getattr(function, "__func__", function)
    function = function.func if isinstance(function, functools.partial) else function
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _is_interface(forward: Callable) -> bool:
    """Tell whether this function or method is a forward of Transformers' experts interface, or SonicMoEExperts'."""
    function: Any = getattr(forward, "__func__", forward)
    if getattr(function, "__code__", None) is not INTERFACE_CODE:
        return getattr(function, IS_OURS, False)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__))
    interface = cells["experts_interface"].cell_contents
    return interface is ALL_EXPERTS_FUNCTIONS


def _innermost(experts: nn.Module) -> Callable:
    """Find the forward that a call of these experts ends in, below the wrappers of accelerate and of
    `functools.wraps`."""
    return inspect.unwrap(vars(experts).get("forward", type(experts).forward), stop=_is_interface)


def _is_ligers(function: Any) -> bool:
    return callable(function) and _name(function).startswith("liger_kernel.")


def is_bound_by_liger(module: nn.Module) -> bool:
    """Tell whether Liger bound its experts' forward to this module, experts or a wrapper of them."""
    return _is_ligers(vars(module).get("forward"))


def has_liger_forward(module: nn.Module) -> bool:
    """Tell whether Liger replaced a causal language model's forward by one that ends in its fused loss."""
    return _name(module.forward).startswith("liger_kernel.transformers.model.")


def _is_outside_interface(experts: nn.Module, forward: Callable) -> bool:
    """Tell whether the forward is the one that the class was written with, and no base of the class has the
    interface's."""
    written = f"{type(experts).__module__}.{type(experts).__qualname__}.forward"
    bases = [vars(base)["forward"] for base in type(experts).__mro__[1:] if "forward" in vars(base)]
    return _name(forward) == written and not any(map(_is_interface, bases))


def why_not_reached(experts: nn.Module) -> str | None:
    """Say why a call of the experts would not reach the experts interface, with the remedy; None where it does.

    Legitimate are accelerate's hooks, Transformers' tensor and expert parallelism, and what declares `__wrapped__`.
    """
    if (replaced := why_replaced_by_liger(experts)) is not None:
        return replaced
    if is_adoptable(experts):
        return None
    forward = _innermost(experts)
    if _is_interface(forward) or _name(forward).startswith(PARALLEL):
        return None
    if _is_outside_interface(experts, forward):
        return (
            f"{type(experts).__name__}: its forward is its class's own, which does not call Transformers' experts "
            "interface, so sonicmoe_hf cannot compute these experts; train this model without sonicmoe_hf"
        )
    remedy = "undo what put it there"
    if _is_ligers(forward):
        remedy = "sonicmoe_hf.patch_model(model) undoes that" if is_bound_by_liger(experts) else LIGER_SWITCH
    return f"{type(experts).__name__}: its forward is {_name(forward)}, which never reaches sonicmoe_hf; {remedy}"


def unbind_liger(experts: nn.Module) -> None:
    """Take from these experts, or from a wrapper of them, what Liger bound to them."""
    if is_bound_by_liger(experts):
        methods = [name for name, value in vars(experts).items() if isinstance(value, types.MethodType)]
        for name in methods:  # Liger's name for `repr` goes with its forward
            if _is_ligers(vars(experts)[name]):
                delattr(experts, name)
