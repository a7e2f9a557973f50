"""The router loss that Transformers' models or TRL's trainers have of their own: whether one is added, and its weight."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..patching.moe_layers import transformers_model


class RouterLoss(NamedTuple):
    """A router loss beside that of LoadBalancing.

    coefficient: its weight, 0 where none is added. is_trainers: whether a trainer adds it, rather than the model.
    """

    coefficient: float
    is_trainers: bool


def router_loss(model: nn.Module, args: Any) -> RouterLoss:
    """Find the weight of the model's own router loss: TRL's trainers add it as their arguments say, or else the model's
    config; models add it whose config has them return router logits.

    Args:
        args: of the Trainer; None without one.
    """
    config = transformers_model(model).config.get_text_config()
    is_trainers = hasattr(args, "router_aux_loss_coef")
    adds = hasattr(config, "output_router_logits") if is_trainers else getattr(config, "output_router_logits", False)
    coefficient: Any = getattr(args, "router_aux_loss_coef", None)
    if coefficient is None:
        coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    return RouterLoss(coefficient if adds else 0.0, is_trainers)
