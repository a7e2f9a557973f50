"""The hooks that patching installs: on each router, and on each model that contains experts.

They are module-level classes. A router's know nothing of its model but its state, and what the call in progress says
(calls.py), so that patched models, and any part of one, copy, pickle and compile as before. On and off is an attribute of
that state: a hook added or removed has compiled code compiled again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..layer.config import TokenRounding
from ..layer.holding import expert_parallelism
from ..private import attributes
from ..private.torch import guard_module_hooks, is_compiled
from ..private.transformers import parallel_mesh
from . import calls, handlers, routing_contexts
from .balance import BiasLoad, hook_loss, share_of_batch
from .calls import ModelCall, PatchState
from .expert_load import ExpertLoad
from .padding import given_mask, given_token_types, valid_tokens
from .support import experts_and_wrappers, find_layers, undo_liger_and_check


def installed(module: nn.Module) -> Any:
    """The RouterHook or ModelHook that patching installed on a module, or None."""
    return vars(module).get(attributes.HOOK, (None,))[0]


def remove_installed(module: nn.Module) -> None:
    """Remove what patching installed on a module."""
    _, *handles = vars(module).pop(attributes.HOOK, (None,))
    for handle in handles:
        handle.remove()


class RouterHook:
    """Forward hook of a router: has it do what the call in progress asks of it (handlers.py).

    load, balance: what it counted, for reports and for the next update of its bias.
    """

    state: PatchState  # of the model

    def __init__(self, family_name: str, layer_name: str):
        self.family_name = family_name
        self.layer_name = layer_name
        self.load = ExpertLoad()
        self.balance = BiasLoad()

    def __deepcopy__(self, memo):
        """In a copy of the whole model, whose own hooks are copied first, a hook of the copy; otherwise (PEFT copies
        routers) of the same model."""
        copied = memo[id(self)] = type(self)(self.family_name, self.layer_name)
        copied.load, copied.balance = copy.deepcopy((self.load, self.balance), memo)
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
        work = call.in_training if router.training else call.handlers
        if not work:
            return None
        run = handlers.RouterRun(self, router, output, forward)
        if router.training and call.gradients:
            calls.check_checkpointing(call, self.layer_name)
            run.valid_T = valid_tokens(forward, run.family, self.layer_name, run.num_tokens, run.logits_TE.device)
            if state.reports:
                state.reported = True
        for handle in work:
            handle(run)
        return run.output()


class ModelHook:
    """Forward pre-hook (with kwargs) of a model, `enter`, and forward hook, called after errors too, `leave`: they note
    whether gradients are on, and which tokens are padding.

    Before the first call, and the first under a policy, it also checks that the layers support it: quantizers,
    use_kernels, parallelism and Liger may have changed them since patching. Later and compiled calls check only whether a
    forward of the experts was replaced again.
    """

    def __init__(self) -> None:
        self.checked_policies: tuple[TokenRounding | None, ...] = ()
        # experts and wrappers, with a forward of their own
        self.forwards: list[tuple[nn.Module, Callable | None]] = []

    def bind(self, state: PatchState, model: nn.Module) -> None:
        """Take the settings of a model that is `model`, the hook's module, or has it inside."""
        self.state = state
        self.parameters = list(inspect.signature(type(model).forward).parameters)[1:]  # without self
        self._list_forwards(model)

    def _list_forwards(self, model: nn.Module) -> None:
        self.forwards = [(module, vars(module).get("forward")) for module in experts_and_wrappers(model)]

    def __getstate__(self):
        return {**vars(self), "checked_policies": (), "forwards": []}  # a copy is checked afresh

    def __setstate__(self, attributes):
        vars(self).update(attributes)
        guard_module_hooks()  # for a model that comes from another process
        calls.capture()

    def enter(self, model: nn.Module, args, kwargs):
        """A forward of the model begins."""
        forward = calls.begin(self)
        call = forward.call
        if forward.is_outermost:
            if torch.compiler.is_compiling():
                self._check_compiled()
            else:
                self._check(model)
            self._prepare(model, call, kwargs)
        if call.in_training:
            arguments = {**dict(zip(self.parameters, args)), **kwargs}
            mask = given_mask(arguments)
            forward.attention_mask = forward.attention_mask if mask is None else mask
            forward.token_types = given_token_types(arguments, forward.token_types)

    def _prepare(self, model: nn.Module, call: ModelCall, kwargs: dict) -> None:
        """Say what a new call's routers have to do, and note what they and its end need for that."""
        state = self.state
        policy, balancing = state.policy, state.balancing
        recording, replay = routing_contexts.active(state)
        trains = policy is not None or balancing is not None or state.counting
        follows = recording is not None or replay is not None
        if not (trains or follows):
            return
        if trains:
            _check_no_replica(model)
        _check_runs_once(model, call.gradients, follows)
        work: list[Callable] = []
        if follows:
            if is_compiled() or policy is not None:
                raise RuntimeError(handlers.NOT_RECORDED)
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
        call.handlers = call.in_training = tuple(work)
        if not call.gradients:
            return
        if policy is not None:
            work.append(handlers.round_tokens)
            if policy.rounding == "stochastic":
                call.batch_group = self._batch_group(model)
        if state.counting:
            work.append(handlers.count_load)
        if balancing is not None:
            call.share, call.loss_weight = share_of_batch(model, kwargs), balancing.loss_weight
            if balancing.counting:
                work.append(handlers.count_tokens)
            if balancing.loss_weight:
                work.append(handlers.add_layer_loss)
        call.in_training = tuple(work)
        state.has_trained = True

    def _batch_group(self, model: nn.Module) -> torch.distributed.ProcessGroup | None:
        """The ranks that have this model's batch too, as it or, where a part of it is called, its experts know."""
        mesh = parallel_mesh(model, "tp")
        if mesh is not None:
            return mesh.get_group()
        implementations = (expert_parallelism(module) for module, _ in self.forwards)
        return next((ours.batch_group for ours in implementations if ours is not None), None)

    def _check_compiled(self) -> None:
        """What Dynamo can trace."""
        for module, forward in self.forwards:
            if module.__dict__.get("forward") is not forward:
                raise RuntimeError(
                    "another forward took the place of these experts' own: call sonicmoe_hf.patch_model(model) again"
                )

    def _check(self, model: nn.Module) -> None:
        policy = self.state.policy
        is_checked = policy in self.checked_policies
        for module, forward in self.forwards:
            is_checked = is_checked and vars(module).get("forward") is forward
        if not is_checked:
            undo_liger_and_check(model, policy)
            if policy is not None:
                check_live(model)
            self._list_forwards(model)
            self.checked_policies = None, policy

    def leave(self, model: nn.Module, args, output):
        """A forward of the model is over, by an error if there is no output."""
        forward = calls.end(self)
        if forward is None or output is None or forward.recomputing:
            return
        state, call = self.state, forward.call
        if not (call.in_training and forward.is_outermost):
            return
        if call.replayed is not None:
            call.replayed.check_used()
        if call.recorded is not None and not call.recorded:
            raise RuntimeError("record_routing: the model was called, and no router of it reported its experts")
        if state.balancing is not None and call.gradients and not torch.compiler.is_compiling():
            hook_loss(call, output)
            state.last = call
            if state.calls_of_loss is not None:
                state.calls_of_loss.append(call)


def check_live(model: nn.Module) -> None:
    """Raise RuntimeError where the router of a layer that has one would not tell us what it routes."""
    for layer in find_layers(model):
        if layer.router is not None and installed(layer.router) is None:
            raise RuntimeError(
                f"{layer.name}: its {type(layer.router).__name__} came into the model after patch_model, whose hook it "
                "lacks; call sonicmoe_hf.patch_model(model) again"
            )


def _check_no_replica(model: nn.Module) -> None:
    """Raise RuntimeError for a replica, which has no parameters of its own."""
    if not torch.compiler.is_compiling() and next(model.parameters(), None) is None:
        raise RuntimeError(
            "token rounding, balancing and load counting do not work under nn.DataParallel, whose replicas share "
            "hooks: launch one process per GPU (torchrun, accelerate launch), or show it a single GPU "
            "(CUDA_VISIBLE_DEVICES=0)"
        )


def _check_runs_once(model: nn.Module, gradients: bool, follows: bool) -> None:
    """Raise RuntimeError where a call whose routers have work begins inside a checkpoint, which runs it twice, at first
    without gradients where it is reentrant. follows: whether they record or replay, in evaluation too."""
    checkpoint = None if torch.compiler.is_compiling() else calls.checkpoint_in_progress()
    if checkpoint is None:
        return
    if follows or (model.training and (gradients or checkpoint.is_reentrant)):
        raise RuntimeError(
            "checkpointing around a whole model runs it twice, and with it token rounding, balancing, counting, "
            "recording and replaying; checkpoint its layers: model.activation_checkpointing_enable() "
            "(gradient_checkpointing_enable() before Transformers 5.23)"
        )
