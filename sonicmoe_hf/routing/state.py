"""RoutingState, which all hooks of one model share, and ModelCall, which has what they know of one call of it.

A call notes the settings that it began with; the settings hold the calls that a training step looks back at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..layer.config import TokenRounding
from .recorded import ReplayedCall


class Balancing(NamedTuple):
    """The balancing that routers do in training. loss_weight: of the layers' mean loss, 0.0 for none; counting: whether
    they count their tokens for the bias update."""

    loss_weight: float
    counting: bool


class RoutingState:
    """The settings that all hooks of one model share.

    policy: token rounding, or None for top-k. counting: whether routers count their loads. balancing: what they do for
    balance, or None. has_warned_of_top_k, has_warned_of_mask: that calls are too small for token rounding, that a mask
    does not fit. last: the call that ended last, while `balancing` needs its scale. calls_of_loss: those that ended
    since a Trainer began to compute its loss, None outside.
    before_step: what of these attributes a training step has changed, as it was.
    token_mask: which tokens of the next calls are no padding, where their attention takes no mask.
    reports: whether routers say, by setting `reported`, that they do in training what policy, counting and balancing ask.
    has_trained: whether a call with gradients had any of these to do, or experts to record or replay.
    """

    def __init__(self) -> None:
        self.policy: TokenRounding | None = None
        self.counting = False
        self.balancing: Balancing | None = None
        self.last: ModelCall | None = None
        self.calls_of_loss: list[ModelCall] | None = None
        self.has_warned_of_top_k = False
        self.has_warned_of_mask = False
        self.before_step: dict[str, Any] = {}
        self.token_mask: torch.Tensor | None = None
        self.reports = self.reported = False
        self.has_trained = False

    def between_steps(self) -> dict[str, Any]:
        """Make the attributes that are others outside a training step and its calls."""
        ended = dict.fromkeys(("last", "calls_of_loss", "token_mask"))
        return {**self.before_step, "before_step": {}, "reports": False, **ended}

    def __getstate__(self):  # a copy, as of an average of weights, is in no step and has had no calls
        return {**vars(self), **self.between_steps()}


class ModelCall:
    """Call of a model, with all that its routers do in it.

    state: its model's settings; policy: theirs when it began. gradients: whether it began with gradients on; trains:
    whether in training mode too, and with work for routers. handlers: this work, in order (handlers.py). It is the same
    where checkpointing computes a layer again, whatever the model's mode is by then.
    share: what part of the optimiser step's tokens it has, as far as its own loss says; loss_scale: what backward
    multiplies its balancing loss by, once it began; num_layer_losses: how many runs of layers that loss is the mean of;
    loss_weight: of that loss.
    recorded, replayed: the experts that it notes ({layer: [indices [T, K] of each run]}), or takes in place of the
    routers' own. batch_group: the ranks that share its batch, if stochastic rounding must draw the same there.
    """

    def __init__(self, state: RoutingState):
        self.state = state
        self.policy = state.policy
        self.gradients = torch.is_grad_enabled()
        self.trains = False
        self.handlers: tuple[Callable, ...] = ()
        self.share: torch.Tensor | float = 1.0
        self.loss_scale: torch.Tensor | None = None
        self.num_layer_losses = 0
        self.loss_weight = 0.0
        self.recorded: dict[str, list[torch.Tensor]] | None = None
        self.replayed: ReplayedCall | None = None
        self.batch_group: torch.distributed.ProcessGroup | None = None
