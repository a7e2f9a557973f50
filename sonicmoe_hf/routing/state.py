"""RoutingState, which all hooks of one model share, TrainingStep, by which a Trainer tells them of its step, and
ModelCall, which has what they know of one call of the model.

A call notes the settings that it began with; the settings hold the calls that a training step looks back at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..layer.config import TokenRounding
from .recorded import ReplayedCall


class Balancing(NamedTuple):
    """The balancing that routers do in training. loss_weight: of the layers' mean loss, 0.0 for none;
    updates_bias: whether they count their loads for the update of their biases."""

    loss_weight: float
    updates_bias: bool


@dataclass(eq=False)
class TrainingStep:
    """Step of a Trainer that a model's calls are part of, as the Trainer tells it; outside one, all is as here. Each
    field names its writers first.
    """

    # RoutingState's attributes that the step has changed, as they were: trainer/steps.py, and set_policy, which drops the
    # policy's; steps.py puts them back
    replaced: dict[str, Any] = field(default_factory=dict)
    # calls that ended since the Trainer began to compute its loss, None outside: trainer/loss_scale.py, and ModelHook,
    # which appends them
    calls_of_loss: list[ModelCall] | None = None
    # which tokens of the next calls are no padding, where their attention takes no mask: trainer/packed_steps.py, for
    # ModelHook
    token_mask: torch.Tensor | None = None
    # whether routers say that they do in training what policy, counts_load and balancing ask: trainer/steps.py, for
    # RouterHook
    reports: bool = False
    # that one has: RouterHook and trainer/steps.py, which reads it as the step ends
    reported: bool = False


class RoutingState:
    """The settings that all hooks of one model share, and what these note of its calls."""

    def __init__(self) -> None:
        # settings, of those who write them; ModelHook reads them as a call begins
        self.policy: TokenRounding | None = None  # top-k where None: of set_policy and a step's callbacks
        self.counts_load = False  # whether routers count their loads: of a step's callbacks
        self.balancing: Balancing | None = None  # what routers do for balance: of LoadBalancing
        self.step = TrainingStep()  # of trainer/
        # notes
        self.last: ModelCall | None = None  # the call that ended last, if balanced: ModelHook's, for LoadBalancing
        self.has_trained = False  # whether routers had work in a call with gradients: ModelHook's, for RouterHook
        self.has_warned_of_top_k = False  # that calls are too small for token rounding: the handler's, for itself
        self.has_warned_of_mask = False  # that a mask does not fit: padding.py's, for itself

    def between_steps(self) -> dict[str, Any]:
        """Make the attributes that are others outside a training step and its calls."""
        return {**self.step.replaced, "step": TrainingStep(), "last": None}

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
