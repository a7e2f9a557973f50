"""The hooks by which routers do more than top-k: on each router, and on each model that contains experts.

They are installed when the first of this work is asked for (patched_model.py), and are module-level classes. A
router's knows nothing of its model but the settings, and what the call in progress says (calls.py), so that patched
models, and any part of one, copy, pickle and compile as before. On and off is an attribute of the settings: a hook added
or removed has compiled code compiled again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from ..layer.config import TokenRounding
from ..layer.holding import expert_parallelism
from ..model_patches import Family
from ..patching.moe_layers import every_copy, every_experts, find_layers, is_replica, models_with_experts
from ..private import attributes
from ..private.torch import is_compiled
from ..private.transformers import parallel_mesh
from . import calls, contexts, handlers
from .balance import BiasLoad
from .call_scale import hook_loss, share_of_batch
from .expert_load import ExpertLoad
from .padding import given_mask, given_token_types, valid_tokens
from .recorded import RecordedRouting
from .state import ModelCall, RoutingState
from .support import undo_liger_and_check_policy


def hook_of(module: nn.Module) -> Any:
    """Get the RouterHook or ModelHook of a module, or None."""
    return vars(module).get(attributes.HOOK, (None,))[0]


def routers(model: nn.Module) -> Iterator[tuple[Family, str, Any]]:
    """Yield every router of our families, its family and its layer's name; also those that PEFT's modules_to_save keeps
    and does not call now."""
    for layer in find_layers(model, copies=True):
        if layer.family is not None:
            for router in every_copy(getattr(layer.block, layer.family.router_attribute)):
                yield layer.family, layer.name, router


def install_hooks(model: nn.Module, state: RoutingState) -> None:
    """Make every router of a patched model, and every model in it that contains experts, obey these settings."""
    calls.capture()
    hook_routers(model, state)
    for module in models_with_experts(model):
        hook = hook_of(module)
        if hook is None:
            hook = ModelHook()
            before = module.register_forward_pre_hook(hook.enter, with_kwargs=True)
            after = module.register_forward_hook(hook.leave, always_call=True)
            vars(module)[attributes.HOOK] = hook, before, after
        hook.bind(state, module)


def hook_routers(model: nn.Module, state: RoutingState) -> None:
    """Make every router of a patched model obey these settings."""
    for family, layer_name, router in routers(model):
        hook = hook_of(router)
        if hook is None:
            hook = RouterHook(family.name, layer_name)
            vars(router)[attributes.HOOK] = hook, router.register_forward_hook(hook)
        hook.layer_name, hook.state = layer_name, state


class RouterHook:
    """Forward hook of a router: has it do what the call in progress asks of it (handlers.py).

    load, bias_load: what it counted, for reports and for the next update of its bias.
    """

    state: RoutingState  # of the model

    def __init__(self, family_name: str, layer_name: str):
        self.family_name = family_name
        self.layer_name = layer_name
        self.load = ExpertLoad()
        self.bias_load = BiasLoad()

    def __deepcopy__(self, memo):
        """Copy as a hook of the copied model, whose own hooks are copied first, or, where a router alone is copied (as
        PEFT does), of the same model."""
        copied = memo[id(self)] = type(self)(self.family_name, self.layer_name)
        copied.load, copied.bias_load = copy.deepcopy((self.load, self.bias_load), memo)
        copied.state = memo.get(id(self.state), self.state)
        return copied

    def __call__(self, router: nn.Module, args, output):
        state = self.state
        forward = calls.in_progress(state)
        if forward is None:
            if state.has_trained:
                calls.check_checkpointing(None, self.layer_name)
            return None
        call = forward.call
        if not call.handlers:
            return None
        run = handlers.RouterRun(self, router, output, forward)
        if call.trains:
            calls.check_checkpointing(call, self.layer_name)
            run.valid_T = valid_tokens(forward, run.family, self.layer_name, run.num_tokens, run.logits_TE.device)
            if state.step.reports:
                state.step.reported = True
        for handle in call.handlers:
            handle(run)
        return run.output()


class ModelHook:
    """Forward pre-hook (with kwargs) of a model, `enter`, and forward hook, called after errors too, `leave`: the first
    begins a call, chooses what its routers do and notes which tokens are padding; the second ends it, checks what was
    recorded and replayed, and hooks the loss.

    Before the first uncompiled call under a policy it also undoes Liger's change of the experts, checks that the layers
    support the policy, which parallelism may have changed since it was set, and hooks new routers.
    """

    def __init__(self) -> None:
        self.checked_policy: TokenRounding | None = None
        self.experts: list[nn.Module] = []

    def bind(self, state: RoutingState, model: nn.Module) -> None:
        """Obey these settings, which are those of `model`, the module of this hook, or of a model around it."""
        self.state = state
        self.parameters = list(inspect.signature(type(model).forward).parameters)[1:]  # without self
        self.experts = every_experts(model)

    def __getstate__(self):
        return {**vars(self), "checked_policy": None, "experts": []}  # a copy is checked afresh

    def __setstate__(self, values):
        vars(self).update(values)
        calls.capture()  # for a model that comes from another process

    def enter(self, model: nn.Module, args, kwargs):
        """Begin a forward of the model."""
        is_compiling = torch.compiler.is_compiling()
        # torch's frame, which calls the forward too; in no local name, or an error here would keep all frames by a cycle
        forward = calls.begin(self, None if is_compiling else cast(FrameType, inspect.currentframe()).f_back)
        call = forward.call
        if forward.is_outermost:
            if not is_compiling:
                self._check_policy(model)
            self._prepare(model, call, kwargs)
        if call.trains:
            arguments = {**dict(zip(self.parameters, args)), **kwargs}
            token_mask = self.state.step.token_mask
            outer_mask = forward.attention_mask if token_mask is None else token_mask
            forward.attention_mask = given_mask(arguments, outer_mask)
            forward.token_types = given_token_types(arguments, forward.token_types)

    def _prepare(self, model: nn.Module, call: ModelCall, kwargs: dict) -> None:
        """Decide the work of a new call's routers, and note what they and the call's end need for it."""
        state = self.state
        recording, replay = contexts.active(state)
        has_training_work = state.policy is not None or state.balancing is not None or state.counts_load
        in_context = recording is not None or replay is not None
        if not (has_training_work or in_context):
            return
        if has_training_work:
            _check_no_replica(model)
        _check_runs_once(model, call.gradients, in_context)
        work = self._context_work(call, recording, replay) if in_context else []
        call.trains = model.training and call.gradients
        if call.trains:
            work += self._training_work(model, call, kwargs)
        if work and call.gradients:
            state.has_trained = True
        call.handlers = tuple(work)

    def _context_work(
        self, call: ModelCall, recording: RecordedRouting | None, replay: contexts.Replay | None
    ) -> list[Callable]:
        """List the handlers that a new call's routers run because of this thread's `with` blocks, and give the call what
        these record to or replay."""
        if is_compiled() or self.state.policy is not None:
            raise RuntimeError(handlers.NOT_RECORDED)
        work: list[Callable] = []
        if replay is not None:
            if not replay:
                raise RuntimeError(
                    "the model was called more often than the replayed routing has calls; record as many calls, or "
                    "call it after the `with`"
                )
            call.replayed = replay.popleft()
            work.append(handlers.replay)
        if recording is not None:
            call.recorded = {}
            recording.calls.append(call.recorded)
            work.append(handlers.record)
        return work

    def _training_work(self, model: nn.Module, call: ModelCall, kwargs: dict) -> list[Callable]:
        """List the handlers that a new call's routers run in training, and note in the call what these need."""
        policy, balancing = self.state.policy, self.state.balancing
        work: list[Callable] = []
        if policy is not None:
            work.append(handlers.round_by_policy)
            if policy.rounding == "stochastic":
                call.batch_group = self._batch_group(model)
        if self.state.counts_load:
            work.append(handlers.count_load)
        if balancing is not None:
            call.share, call.loss_weight = share_of_batch(model, kwargs), balancing.loss_weight
            if balancing.updates_bias:
                work.append(handlers.count_bias_load)
            if balancing.loss_weight:
                work.append(handlers.add_layer_loss)
        return work

    def _batch_group(self, model: nn.Module) -> torch.distributed.ProcessGroup | None:
        """Find the ranks that have this model's batch too, as it or, where a part of it is called, its experts know."""
        mesh = parallel_mesh(model, "tp")
        if mesh is not None:
            return mesh.get_group()
        implementations = map(expert_parallelism, self.experts)
        return next((ours.batch_group for ours in implementations if ours is not None), None)

    def _check_policy(self, model: nn.Module) -> None:
        """Undo Liger's change of the experts, check that the layers support the policy, and hook the routers that came
        since it was set, once a policy."""
        policy = self.state.policy
        if policy is not None and policy != self.checked_policy:
            undo_liger_and_check_policy(model, policy)
            hook_routers(model, self.state)
            self.experts, self.checked_policy = every_experts(model), policy

    def leave(self, model: nn.Module, args, output):
        """End a forward of the model, by an error if there is no output."""
        forward = calls.end(self)
        if forward is None or output is None or forward.recomputing:
            return
        state, call = self.state, forward.call
        if not (call.handlers and forward.is_outermost):
            return
        if call.replayed is not None:
            call.replayed.check_used()
        if call.recorded is not None and not call.recorded:
            raise RuntimeError("record_routing: the model was called, and no router of it reported its experts")
        if state.balancing is not None and call.trains and not torch.compiler.is_compiling():
            hook_loss(call, output)
            state.last = call
            if state.step.calls_of_loss is not None:
                state.step.calls_of_loss.append(call)


def _check_no_replica(model: nn.Module) -> None:
    if not torch.compiler.is_compiling() and is_replica(model):
        raise RuntimeError(
            "token rounding, balancing and load counting do not work under nn.DataParallel, whose replicas share "
            "hooks: launch one process per GPU (torchrun, accelerate launch), or show it a single GPU "
            "(CUDA_VISIBLE_DEVICES=0)"
        )


def _check_runs_once(model: nn.Module, gradients: bool, in_context: bool) -> None:
    """Raise RuntimeError where a call whose routers have work begins inside a checkpoint, which runs it twice, at first
    without gradients where it is reentrant. in_context: whether they record or replay, in evaluation too."""
    checkpoint = None if torch.compiler.is_compiling() else calls.checkpoint_in_progress()
    if checkpoint is None:
        return
    if in_context or (model.training and (gradients or checkpoint.is_reentrant)):
        raise RuntimeError(
            "checkpointing around a whole model runs it twice, and with it token rounding, balancing, counting, "
            "recording and replaying; checkpoint its layers: model.activation_checkpointing_enable() "
            "(gradient_checkpointing_enable() before Transformers 5.23)"
        )
