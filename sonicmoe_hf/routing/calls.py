"""The model calls in progress, by thread, and the calls that gradient checkpointing runs again.

A call (ModelCall) begins with the outermost forward of a model with experts; a Forward is one model's part of it. Layers
that torch.utils.checkpoint computes again in backward, in any thread of autograd's, belong to the call of their first
computation (private/torch.py says how we hear of it):

    forward   model(x)      begin -> ModelCall 1   layer 0 (checkpointed): capture remembers call 1   end
    backward  autograd's thread      layer 0 again: call 1 is in progress there, with its mask and handlers
    forward   model(x)      begin -> ModelCall 2   ...
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import torch

from ..private.torch import capture_checkpoints, current_graph_task_id
from .state import ModelCall, RoutingState

NOT_KNOWN = (
    "{layer} {what}, and not by torch.utils.checkpoint: token rounding, balancing, counting, recording and replaying do "
    "not know which model call it is part of. Use model.activation_checkpointing_enable() (before Transformers 5.23 "
    "gradient_checkpointing_enable()), or torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class HookOfModel(Protocol):
    """The part of hooks.ModelHook that a forward knows."""

    state: RoutingState


class Forward:
    """Forward of the model, or of a model inside it, that is part of a call.

    hook: the ModelHook of the module. outer: the forward around it in this thread, of any model. frame: the Python frame
    that runs it, None in compiled code and once it is over. attention_mask: [B, S] or None; token_types: [B, S] or None,
    see `Family.token_types`; both are the outer forward's of the same call where this one has none.
    recomputing: whether checkpointing runs it again. max_sizes: this rank's sizes in its layers and their maximum over
    the ranks, which expert_parallel/exchange.py keeps here because they hold as long, and in what is run again too.
    """

    def __init__(self, call: ModelCall, hook: HookOfModel, outer: Forward | None, frame: FrameType | None):
        self.call = call
        self.hook = hook
        self.outer = outer
        self.frame = frame
        self.attention_mask: torch.Tensor | None = None
        self.token_types: torch.Tensor | None = None
        self.recomputing = False
        self.max_sizes: tuple[list[int], list[int]] | None = None

    @property
    def is_outermost(self) -> bool:
        """Tell whether its call began with it."""
        return self.outer is None or self.outer.call is not self.call


class CheckpointedFunction:
    """Use of torch.utils.checkpoint, whose `function` is part of `forward`, also when backward computes it again."""

    def __init__(self, function: Callable, is_reentrant: bool):
        self.function = function
        self.forward = in_progress()
        self.is_reentrant = is_reentrant
        self.has_run = False

    def __call__(self, *args):
        """Run the function of a reentrant checkpoint, at first in forward and then in backward."""
        run = self.run_again if self.has_run else self.run
        self.has_run = True
        return run(*args)

    def enter(self) -> CheckpointedFunction | None:
        """Begin in this thread, and return the checkpoint around this one."""
        around, _thread.checkpoint = checkpoint_in_progress(), self
        return around

    def run(self, *args, **kwargs):
        """Run the function for the first time."""
        around = self.enter()
        try:
            return self.function(*args, **kwargs)
        finally:
            _thread.checkpoint = around

    def run_again(self, *args, **kwargs):
        """Run the function in backward, in whichever thread that is: its forward is in progress once more."""
        forward, _thread.forward = in_progress(), _recomputing(self.forward)
        try:
            return self.run(*args, **kwargs)
        finally:
            _thread.forward = forward


def _recomputing(forward: Forward | None) -> Forward | None:
    if forward is None:
        return None
    forward = copy.copy(forward)
    forward.recomputing, forward.frame = True, None
    return forward


_thread = threading.local()  # forward: the innermost one in progress; checkpoint: likewise


def in_progress(state: RoutingState | None = None) -> Forward | None:
    """Find the innermost forward of this thread, of that model if given."""
    # no class default of the thread's: torch.compile would not notice its change
    forward: Forward | None = getattr(_thread, "forward", None)
    while forward is not None and state is not None and forward.call.state is not state:
        forward = forward.outer
    return forward


def checkpoint_in_progress() -> CheckpointedFunction | None:
    """Find the innermost use of torch.utils.checkpoint in this thread, outside compiled code."""
    return getattr(_thread, "checkpoint", None)


def begin(hook: HookOfModel, frame: FrameType | None) -> Forward:
    """Begin a forward of the module with this ModelHook, which `frame` runs.

    It is part of the call around it, unless that is of another model or inside a forward of the same module already (a
    hook may call the model that it is in).

    What interrupted forwards left behind ends here: torch calls no hooks after KeyboardInterrupt.
    """
    outer: Forward | None = getattr(_thread, "forward", None)
    while outer is not None and outer.frame is not None and not _is_below(outer.frame, frame):
        outer = outer.outer
    if outer is None or outer.call.state is not hook.state or _is_inside(outer, hook):
        _thread.forward = forward = Forward(ModelCall(hook.state), hook, outer, frame)
    else:
        _thread.forward = forward = Forward(outer.call, hook, outer, frame)
        forward.attention_mask, forward.token_types = outer.attention_mask, outer.token_types
        forward.recomputing = outer.recomputing
    return forward


def _is_below(frame: FrameType, above: FrameType | None) -> bool:
    """Tell whether a frame is still running, below `above` on this thread's stack: a few steps, unless it is over."""
    while above is not None and above is not frame:
        above = above.f_back
    return above is frame


def _is_inside(forward: Forward, hook: HookOfModel) -> bool:
    """Tell whether `forward`, or one around it in the same call, is of the module that has this hook."""
    around: Forward | None = forward
    while around is not None and around.call is forward.call:
        if around.hook is hook:
            return True
        around = around.outer
    return False


def end(hook: HookOfModel) -> Forward | None:
    """End the forward of the module with this ModelHook, after an error too, and return it; None where it never began."""
    forward: Forward | None = getattr(_thread, "forward", None)
    if forward is None or forward.hook is not hook:
        return None
    _thread.forward, forward.frame = forward.outer, None
    return forward


def check_checkpointing(call: ModelCall | None, layer: str) -> None:
    """Raise RuntimeError where a router that has something to do in `call`, or had before, is run by a checkpointing that
    we do not hear of: without gradients in a call that has them, or in backward outside any call.

    layer: not the first argument, which Dynamo of torch 2.11 guards, so that each layer would be compiled anew.
    """
    if torch.compiler.is_compiling() or checkpoint_in_progress() is not None:
        return
    if call is not None and call.gradients and not torch.is_grad_enabled():
        raise RuntimeError(NOT_KNOWN.format(layer=layer, what="runs without gradients in a model call that has them"))
    if call is None and current_graph_task_id() != -1:
        raise RuntimeError(NOT_KNOWN.format(layer=layer, what="runs in backward"))


def capture() -> None:
    """Hear of every use of torch.utils.checkpoint from now on."""
    capture_checkpoints(_non_reentrant, _reentrant)


def _non_reentrant(checkpointed: Callable, function: Callable, *args, **kwargs):
    """Wrap the generator of torch.utils.checkpoint: torch runs it to its yield, calls `function`, then resumes it."""
    checkpoint = CheckpointedFunction(function, is_reentrant=False)
    steps = checkpointed(checkpoint.run_again, *args, **kwargs)
    around = checkpoint.enter()
    try:
        yield from steps
    finally:
        _thread.checkpoint = around


def _reentrant(checkpointed: Callable, ctx, function: Callable, *args):
    """Wrap the forward of torch.utils.checkpoint's CheckpointFunction."""
    return checkpointed(ctx, CheckpointedFunction(function, is_reentrant=True), *args)
