"""Token rounding's support: the layers of a model where it does not work, and why."""

from __future__ import annotations

from torch import nn

from ..errors import UnsupportedModelError
from ..layer.config import TokenRounding
from ..layer.holding import Holder, expert_parallel_remedy, holding_of
from ..patching.moe_layers import MoELayer, find_layers
from ..patching.support import LayerSupport, undo_liger_and_check

FIXED = (
    "fully supported, with the experts of a token from a table, which token rounding and balancing leave as they are"
)


def _why_no_rounding(layer: MoELayer) -> str | None:
    if layer.family is None:
        return "token rounding does not know its router; docs/models.md lists the models it works in"
    holder = holding_of(layer.experts).by
    if holder in (Holder.THEIR_EXPERT_PARALLEL, Holder.TENSOR_PARALLEL):
        return f"token rounding does not work under {holder.value}; {expert_parallel_remedy()}"
    forward = type(layer.block).forward
    if forward.__module__ != layer.family.module:
        return (
            f"{type(layer.block).__name__} has the forward {forward.__module__}.{forward.__qualname__}, of which nobody "
            f"knows that it hands its router's indices to its experts, as {layer.family.block} of Transformers does"
        )
    return None


def why_no_rounding(model: nn.Module) -> dict[str, str]:
    """Find the mixture-of-experts layers of `model` (also on the meta device) where token rounding does not work, and why
    not, by the layer's name."""
    reasons = {layer.name: _why_no_rounding(layer) for layer in find_layers(model)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def why_left_unrounded(model: nn.Module) -> dict[str, str]:
    """Find the layers that token rounding leaves as they are, and why: where it does not work, and those that take a
    token's experts from a table, which a model that rounds may have."""
    layers = find_layers(model)
    fixed = {each.name: FIXED for each in layers if each.family and each.family.has_fixed_experts(each.router)}
    return fixed | why_no_rounding(model)


def with_rounding_reasons(layers: list[LayerSupport], model: nn.Module) -> list[LayerSupport]:
    """Set the reason of accelerated layers that token rounding leaves as they are."""
    reasons = why_left_unrounded(model)
    return [
        layer._replace(reason=reasons.get(layer.name, layer.reason)) if layer.accelerated else layer
        for layer in layers
    ]


def undo_liger_and_check_policy(
    model: nn.Module, policy: TokenRounding | None, remedy: str = "use routing=None"
) -> None:
    """Undo Liger's change of the experts, and check that every layer can be accelerated and do what the policy asks.

    remedy: what the error says to do where a layer cannot round.

    Raises:
        UnsupportedModelError: one cannot; but for what Liger did the model is as it was.
    """
    undo_liger_and_check(model)
    if policy is not None:
        for name, reason in why_no_rounding(model).items():
            raise UnsupportedModelError(f"no token rounding in {name}: {reason}; {remedy}")
