"""The work of routers in a model call, one function each: replay, record, round tokens, count, balance.

Each takes a RouterRun, and changes what the router returns there or notes something of it. A call says which of them
apply (hooks.py); an ordinary call has none.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import nn

from ..layer.routing import Routing, TokenRounding, rounded_routing
from ..model_patches import FAMILIES
from ..private.torch import is_compiled
from .balance import BiasLoad, layer_loss, with_layer_loss
from .calls import Forward
from .expert_load import ExpertLoad
from .recorded import with_experts

logger = logging.getLogger(__name__)
SMALLEST_TILE = 8  # rows: below it rounding adds or drops hardly any
NOT_RECORDED = (
    "record_routing and replay_routing work neither in a compiled model nor with token rounding; use "
    'set_routing(model, "top_k")'
)


class HookOfRouter(Protocol):
    """The part of hooks.RouterHook that handlers know."""

    family_name: str
    layer_name: str
    load: ExpertLoad
    bias_load: BiasLoad


class RouterRun:
    """Forward of one router.

    hook: the router's RouterHook; forward: which this is part of. logits_TE, weights_TK, index_TK: what the router
    returns by now. valid_T: False marks padding, None where all tokens count; set in training alone. routing: that of
    token rounding, or None; fell_back: rounding was asked for, but top-k stands; a bool or a tensor.
    """

    def __init__(self, hook: HookOfRouter, router: nn.Module, output: tuple, forward: Forward):
        self.hook = hook
        self.family = FAMILIES[hook.family_name]
        self.router: Any = router
        self.forward = forward
        self.call: Any = forward.call  # a handler runs where its call has what it needs
        self.logits_TE, self.weights_TK, self.index_TK = output
        self.num_tokens, self.num_experts = self.logits_TE.shape
        self.valid_T: torch.Tensor | None = None
        self.routing: Routing | None = None
        self.fell_back: bool | torch.Tensor = False

    def output(self) -> tuple:
        """Make the router's output. The weights stand beside a Routing too: DeepSpeed gathers the router's own
        for backward where a tensor of a tuple asks for it."""
        if self.routing is None:
            return self.logits_TE, self.weights_TK, self.index_TK
        return self.logits_TE, self.routing.weights, self.routing


def _check_not_compiled(message: str) -> None:
    if is_compiled():
        raise RuntimeError(message)


def replay(run: RouterRun) -> None:
    """Take the experts from a recorded call."""
    _check_not_compiled(NOT_RECORDED)
    given_TK = run.call.replayed.next_run(run.hook.layer_name, run.forward.recomputing)
    output = run.logits_TE, run.weights_TK, run.index_TK
    _, run.weights_TK, run.index_TK = with_experts(run.family, run.router, output, given_TK)


def record(run: RouterRun) -> None:
    """Note the experts."""
    _check_not_compiled(NOT_RECORDED)
    if not run.forward.recomputing:
        run.call.recorded.setdefault(run.hook.layer_name, []).append(run.index_TK.to(torch.int32))


def round_by_policy(run: RouterRun) -> None:
    """Round every expert's tokens by the policy, unless they are too few or a table gives their experts."""
    if run.family.has_fixed_experts(run.router):
        return
    policy, top_k = run.call.policy, run.index_TK.shape[1]
    if not policy.applies(run.num_tokens, top_k, run.num_experts):
        run.fell_back = True
        _warn_of_top_k(run, policy, top_k)
        return
    run.routing, run.fell_back = rounded_routing(
        run.family,
        run.router,
        run.logits_TE,
        run.index_TK,
        policy,
        run.valid_T,
        dtype=run.weights_TK.dtype,
        batch_group=run.call.batch_group,
    )


def _warn_of_top_k(run: RouterRun, policy: TokenRounding, top_k: int) -> None:
    state, num_tokens, num_experts = run.call.state, run.num_tokens, run.num_experts
    padding = "" if run.valid_T is None else ", padding included"  # counting the others would wait for the device
    fitting = int(num_tokens * top_k / num_experts / policy.min_tiles_per_expert)
    is_tile = fitting >= SMALLEST_TILE
    smaller = f"tile={1 << fitting.bit_length() - 1}" if is_tile else "a smaller tile= and min_tiles_per_expert="
    if not state.has_warned_of_top_k and not torch.compiler.is_compiling():
        state.has_warned_of_top_k = True
        logger.warning(
            f"sonicmoe_hf: {num_tokens} tokens with top-{top_k} of {num_experts} experts are "
            f"{num_tokens * top_k / num_experts:.0f} rows per expert{padding}, fewer than "
            f"{policy.min_tiles_per_expert:g} tiles of {policy.tile_rows}: such calls use top-k, not token rounding; "
            f"larger batches round, or {smaller} (TokenRoundingCallback, TokenRounding)"
        )


@torch.no_grad()
def count_load(run: RouterRun) -> None:
    """Count the pairs of every expert."""
    if run.forward.recomputing:
        return
    policy, routing = run.call.policy, run.routing
    run.hook.load.count(
        run.index_TK,
        run.num_experts,
        rows_E=None if routing is None else routing.rows.offsets.diff(),
        fell_back=run.fell_back,
        tile=1 if policy is None else policy.tile_rows,
        valid_T=run.valid_T,
    )


@torch.no_grad()
def count_bias_load(run: RouterRun) -> None:
    """Count the pairs that top-k makes of every expert, for the next update of the router's bias; a table has none."""
    if run.family.has_fixed_experts(run.router):
        return
    if not run.forward.recomputing:
        run.hook.bias_load.count(run.index_TK, run.num_experts, valid_T=run.valid_T)


def add_layer_loss(run: RouterRun) -> None:
    """Add the balancing loss of this layer, which counts top-k before rounding, to the backward of the weights; none
    where a table gives the experts, which no score could change."""
    if run.family.has_fixed_experts(run.router):
        return
    if not run.forward.recomputing:
        run.call.num_layer_losses += 1
    if not torch.is_grad_enabled():
        return
    _check_not_compiled("LoadBalancing(per_layer_loss=...) does not work in a compiled model")
    scores_TE, _ = run.family.scores(run.router, run.logits_TE)
    loss = run.call.loss_weight * layer_loss(scores_TE, run.index_TK, run.valid_T)
    weights = run.weights_TK if run.routing is None else run.routing.weights
    weights = with_layer_loss(weights, loss, run.call)
    if run.routing is None:
        run.weights_TK = weights
    else:
        run.routing = run.routing.with_weights(weights)
