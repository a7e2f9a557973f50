"""The hooks that patching installs: on each router, on each experts module until its first call, and one pair on each
model that contains routers.

All are module-level classes. A router's know nothing of its model but its state, and what the call in progress says
(calls.py), so that patched models, and any part of one, copy, pickle and compile as before. On and off is an attribute of
that state: a hook added or removed has compiled code compiled again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..layer.config import TokenRounding
from ..layer.experts_module import IMPLEMENTATION, expert_parallelism
from ..layer.routing import MISPLACED, rounded_routing
from ..model_patches import FAMILIES
from ..private.torch import forward_hooks, guard_module_hooks, is_compiled, remove_hooks, tree_leaves
from ..private.transformers import experts_implementation, parallel_mesh
from . import calls
from .balance import TokenCounts, hook_loss, layer_loss, share_of_batch, with_layer_loss
from .calls import ModelCall, PatchState
from .expert_load import ExpertLoad
from .experts import was_reached
from .forwards import why_not_reached
from .padding import given_mask, given_token_types, valid_tokens
from .recorded import replayed
from .routing_contexts import recording_of, replay_of
from .support import Layer, experts_and_wrappers, find_layers, undo_liger_and_check

logger = logging.getLogger(__name__)
NOT_RECORDED = (
    "record_routing and replay_routing work neither in a compiled model nor with token rounding; use "
    'set_routing(model, "top_k")'
)


def find_hook(hooks: list, kind: type):
    """The hook of that class among a module's, or None."""
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


class RouterHook:
    """Forward hook of a router: replays and records its experts, where a context asks for it. In training it returns a
    Routing in place of the indices while token rounding is active, counts its tokens, and has the balancing loss follow
    its weights.

    Training is: the router is in training mode, and the outermost model call had gradients enabled.
    """

    def __init__(self, family_name: str, layer_name: str):
        self.family_name = family_name
        self.layer_name = layer_name
        self.load = ExpertLoad()
        self.balance = TokenCounts()

    def join(self, state: PatchState) -> None:
        """Belong to a model with these settings."""
        self.state = state

    def __deepcopy__(self, memo):
        """In a copy of the whole model, whose own hooks are copied first, a hook of the copy; otherwise (PEFT copies
        routers) of the same model."""
        copied = memo[id(self)] = type(self)(self.family_name, self.layer_name)
        copied.load, copied.balance = copy.deepcopy((self.load, self.balance), memo)
        copied.join(memo.get(id(self.state), self.state))
        return copied

    def __call__(self, router: nn.Module, args, output):
        call, recomputing = calls.current(self.state)
        if call is None:
            return None
        changed = None
        if (call.outermost.replayed is not None or call.outermost.recorded is not None) and is_compiled():
            raise RuntimeError(NOT_RECORDED)
        if call.outermost.replayed is not None:
            given_TK = call.outermost.replayed.next_run(self.layer_name, recomputing)
            output = changed = replayed(FAMILIES[self.family_name], router, output, given_TK)
        if call.outermost.recorded is not None and not recomputing:
            call.outermost.recorded.setdefault(self.layer_name, []).append(output[2].to(torch.int32))
        if not router.training or not call.gradients:
            return changed
        if call.policy is None and call.state.balancing is None and not call.state.counting:
            return changed
        if call.state.reports:
            call.state.reported = True
        trained = self._in_training(router, output, call, recomputing)
        return changed if trained is None else trained

    def _in_training(self, router: nn.Module, output, call: ModelCall, recomputing: bool):
        """What the router's output becomes by rounding and balancing, None where it stays as it is."""
        balancing = call.state.balancing
        logits_TE, weights_TK, index_TK = output
        num_tokens, num_experts = logits_TE.shape
        valid_T = valid_tokens(call, FAMILIES[self.family_name], self.layer_name, num_tokens, logits_TE.device)
        policy, rounded, fell_back = call.policy, None, False
        if policy is not None:
            fell_back = not policy.applies(num_tokens, index_TK.shape[1], num_experts)
            if fell_back:
                _say_top_k(call.state, policy, num_tokens, index_TK.shape[1], num_experts)
            else:
                rounded, fell_back = rounded_routing(
                    FAMILIES[self.family_name],
                    router,
                    logits_TE,
                    index_TK,
                    policy,
                    valid_T,
                    dtype=weights_TK.dtype,
                    batch_group=call.outermost.batch_group,
                )
        if call.state.counting and not recomputing:
            tile = 1 if policy is None else policy.tile_rows
            rows_E = None if rounded is None else rounded.rows.offsets.diff()
            with torch.no_grad():
                self.load.record(index_TK, num_experts, rows_E=rows_E, fell_back=fell_back, tile=tile, valid_T=valid_T)
        if balancing is not None:
            if balancing.counting and not recomputing:
                self.balance.record(index_TK, num_experts, valid_T)
            if balancing.loss_weight and not recomputing:
                call.outermost.num_layer_losses += 1
            if balancing.loss_weight and torch.is_grad_enabled():
                weights = weights_TK if rounded is None else rounded.weights
                weights = self._with_layer_loss(router, output, weights, valid_T, call, balancing.loss_weight)
                if rounded is None:
                    return logits_TE, weights, index_TK
                rounded = rounded.weighted_by(weights)
        # the weights beside it too: DeepSpeed gathers the router's own for backward where a tensor of a tuple asks for it
        return None if rounded is None else (logits_TE, rounded.weights, rounded)

    def _with_layer_loss(
        self, router: nn.Module, output, weights: torch.Tensor, valid_T, call: ModelCall, loss_weight: float
    ):
        """The weights, whose backward adds this layer's balancing loss; it counts top-k, before rounding."""
        if is_compiled():
            raise RuntimeError("LoadBalancing(per_layer_loss=...) does not work in a compiled model")
        logits_TE, _, index_TK = output
        scores_TE, _ = FAMILIES[self.family_name].scores(router, logits_TE)
        return with_layer_loss(weights, loss_weight * layer_loss(scores_TE, index_TK, valid_T), call)


def _say_top_k(state: PatchState, policy: TokenRounding, num_tokens: int, top_k: int, num_experts: int):
    if not state.said_top_k and not torch.compiler.is_compiling():
        state.said_top_k = True
        logger.warning(
            f"sonicmoe_hf: {num_tokens} tokens with top-{top_k} of {num_experts} experts are "
            f"{num_tokens * top_k / num_experts:.0f} rows per expert, fewer than {policy.min_tiles_per_expert:g} "
            f"tiles of {policy.tile_rows}: such calls use top-k, not token rounding"
        )


class FirstUseHook:
    """Forward hook of an experts module: its first call that is not compiled must have reached us; then it goes.

    Compiled calls only look whether a forward was put on the instance since; `had_forward`: there was one before.
    """

    def __init__(self, had_forward: bool):
        self.had_forward = had_forward

    def __call__(self, experts: Any, args, output):
        if torch.compiler.is_compiling():
            known = self.had_forward or "_hf_hook" in experts.__dict__ or "_is_hooked" in experts.__dict__
            if "forward" in experts.__dict__ and not known:
                raise RuntimeError("another forward took the place of these experts' own: see patch_model")
        elif experts_implementation(experts.config) == IMPLEMENTATION:
            self._check(experts)

    def _check(self, experts: nn.Module) -> None:
        if was_reached(experts):
            remove_hooks(experts, lambda hook: hook is self)
            return
        reason = why_not_reached(experts)
        if reason is None and is_compiled():
            return  # Dynamo left the model to Python and compiled these experts alone: compiled calls note nothing
        raise RuntimeError(
            f'{type(experts).__name__} was called with experts_implementation="{IMPLEMENTATION}", but never reached '
            f"sonicmoe_hf: {reason or 'another function is registered under that name'}"
        )


class ModelEntryHook:
    """Forward pre-hook (with kwargs) of a model: notes whether gradients are on, and which tokens are padding.

    Before the first call, and the first under a policy, it also checks that the layers can do what is asked: quantizers,
    use_kernels, parallelism and Liger may have changed them since patching. Later calls look whether a forward of the
    experts was replaced again.

    parameters: the names of the model's forward's parameters, in order.
    """

    def __init__(self, parameters: list[str]):
        self.parameters = parameters
        self.checked: list[tuple[nn.Module, Callable | None]] | None = None  # experts and wrappers, their own forward
        self.layers: list[Layer] = []
        self.checked_policy: TokenRounding | None = None

    def join(self, state: PatchState, name: str) -> None:
        """Belong to a model with these settings, in which the hook's module is called `name`."""
        self.state, self.name = state, name

    def __getstate__(self):
        return {**vars(self), "checked": None, "layers": []}  # a copy is checked afresh

    def __setstate__(self, attributes):
        vars(self).update(attributes)
        guard_module_hooks()  # for a model that comes from another process

    def __call__(self, model: nn.Module, args, kwargs):
        outer = calls.in_progress()
        if not torch.compiler.is_compiling() and (outer is None or outer.state is not self.state):
            self._check(model)
        state = self.state
        asked = state.policy is not None or state.balancing is not None or state.counting
        if asked and getattr(model, "_is_replica", False):
            raise RuntimeError(
                "token rounding, balancing and load counting do not work under nn.DataParallel, whose replicas share "
                "hooks: launch one process per GPU (torchrun, accelerate launch), or show it a single GPU "
                "(CUDA_VISIBLE_DEVICES=0)"
            )
        arguments = {**dict(zip(self.parameters, args)), **kwargs}
        mask = given_mask(arguments)
        call = calls.begin(self.state, self.name, mask, model)
        call.token_types = given_token_types(arguments, call.token_types)
        if call is call.outermost:
            self._prepare(model, call, kwargs)

    def _prepare(self, model: nn.Module, call: ModelCall, kwargs: dict) -> None:
        """Note in an outermost call what its routers and its end need for balancing, recording and replaying."""
        state = self.state
        if call.graph_task != -1 and call.gradients:
            _check_not_recomputed(model, state)
        if state.policy is not None and state.policy.rounding == "stochastic":
            call.batch_group = self._batch_group(model)
        if state.balancing is not None:
            call.share = share_of_batch(model, kwargs)
        recording, replay = recording_of(state), replay_of(state)
        if model.training and not call.gradients:
            state.replayed_unseen = replay is not None
        if recording is None and replay is None:
            return
        if is_compiled() or state.policy is not None:
            raise RuntimeError(NOT_RECORDED)
        if replay is not None:
            call.replayed = replay.next_call()
        if recording is not None:
            call.recorded = {}
            recording.calls.append(call.recorded)

    def _batch_group(self, model: nn.Module) -> torch.distributed.ProcessGroup | None:
        """The ranks that have this model's batch too, as it or, where a part of it is called, its experts know."""
        mesh = parallel_mesh(model, "tp")
        if mesh is not None:
            return mesh.get_group()
        implementations = (expert_parallelism(layer.experts) for layer in self.layers)
        return next((ours.batch_group for ours in implementations if ours is not None), None)

    def _check(self, model: nn.Module) -> None:
        policy = self.state.policy
        if self.checked is None or policy not in (None, self.checked_policy) or self._replaced():
            undo_liger_and_check(model, policy)
            self.layers = list(find_layers(model))
            if policy is not None:
                check_live(self.layers)
            self.checked = [(module, vars(module).get("forward")) for module in experts_and_wrappers(model)]
            self.checked_policy = policy
        if policy is not None and model.training and torch.is_grad_enabled():
            for layer in self.layers:
                _check_implementation(layer)

    def _replaced(self) -> bool:
        return any(vars(module).get("forward") is not forward for module, forward in self.checked or ())


def check_live(layers: list[Layer]) -> None:
    """Raise RuntimeError where the router of a layer that has one would not tell us what it routes."""
    for layer in layers:
        if layer.router is not None and find_hook(forward_hooks(layer.router), RouterHook) is None:
            raise RuntimeError(
                f"{layer.name}: its {type(layer.router).__name__} came into the model after patch_model, whose hook it "
                "lacks; call sonicmoe_hf.patch_model(model) again"
            )


def _check_implementation(layer: Layer) -> None:
    implementation = experts_implementation(layer.experts.config)
    if implementation != IMPLEMENTATION:
        raise RuntimeError(f'{layer.name}: experts_implementation is "{implementation}". {MISPLACED}')


def _check_not_recomputed(model: nn.Module, state: PatchState) -> None:
    """Raise RuntimeError where a call that begins in backward has work to do that its first forward left out."""
    asked = state.policy is not None or state.balancing is not None or state.counting or state.replayed_unseen
    if model.training and (asked or state.num_routing_contexts):  # backward runs in a thread of its own
        raise RuntimeError(
            "reentrant checkpointing around a whole model runs it without gradients first, so that token rounding, "
            "balancing, counting, recording and replaying take it for evaluation; use "
            "model.activation_checkpointing_enable() (gradient_checkpointing_enable() before Transformers 5.23), or "
            "checkpoint(model, ..., use_reentrant=False)"
        )


class ModelExitHook:
    """Forward hook (with kwargs) of a model, called after errors too: its call is over. Its outputs' gradients announce
    its backward.

    Gradient checkpointing recomputes layers during backward, outside any model call; autograd runs a later call's whole
    backward before an earlier one's, so the last output whose gradient arrived tells whose layers are recomputed.
    torch.compile cannot hold hooks of tensors: there the last call made is the one whose layers are recomputed.
    """

    def join(self, state: PatchState, name: str) -> None:
        """As ModelEntryHook."""
        self.state, self.name = state, name

    def __call__(self, model: nn.Module, args, kwargs, output):
        call = calls.end(self.state, self.name)
        if call is not None and output is not None:  # None: after an error
            if call.replayed is not None:
                call.replayed.check_used()
            if call.recorded is not None and not call.recorded:
                raise RuntimeError("record_routing: the model was called, and no router of it reported its experts")
        if call is None or not call.gradients:
            return
        if torch.compiler.is_compiling():
            calls.expect_backward(call)
            return
        if self.state.balancing is not None and call is call.outermost:
            hook_loss(call, output)
            self.state.last = call
            if self.state.of_loss is not None:
                self.state.of_loss.append(call)
        # what was given to the model may be among its outputs: its gradient comes late, and it may outlive the call
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None and id(tensor) not in given:
                tensor.register_hook(_Announcement(call))


class _Announcement:
    """Hook of an output: its gradient is there, so the call's backward has begun."""

    def __init__(self, call: ModelCall):
        self.call = call

    def __call__(self, gradient):
        calls.begin_backward(self.call)
