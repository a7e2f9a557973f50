"""The state of a model call: which thread runs it, which of its layers autograd recomputes. Hooks read it and hold none.

A call belongs to the thread that makes it, so it is kept in a threading.local. Backward runs in autograd's own threads,
which see no thread-locals of others: there a call belongs to the graph task that its outputs' gradients arrived in, and
to none after its end. A model's routers see calls of their own model alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import NamedTuple

import torch
from torch import nn

from ..layer.config import TokenRounding
from ..private.torch import at_end_of_backward, current_graph_task_id, running_modules
from .own_configs import Copies
from .recorded import ReplayedCall


class Balancing(NamedTuple):
    """What routers do for balance while training. loss_weight: of the layers' mean loss, 0.0 for none; counting: whether
    they count their tokens for the bias update."""

    loss_weight: float
    counting: bool


class PatchState:
    """The settings that all hooks of one model share.

    policy: token rounding, or None for top-k. counting: whether routers count their loads. balancing: what they do for
    balance, or None. said_top_k, said_mask: whether it was said that calls are too small for token rounding, and that a
    mask does not fit. last: the outermost call that ended last, while `balancing` wants its scale. of_loss: those that
    ended since a Trainer began to compute its loss, None outside. configs: (the config that the model was built from, its
    own copy of it).
    reports: whether routers say, by setting `reported`, that they do in training what policy, counting and balancing ask.
    recomputed: for compiled code, which cannot ask autograd: the call whose backward runs; `made_compiled`: or, of a
    compiled model, which cannot hold hooks of tensors, the last one made.
    replayed_unseen: whether its last call in training mode without gradients replayed a routing; reentrant checkpointing
    may run that call again.
    num_routing_contexts: how many `with` of record_routing and replay_routing there are, in all threads.
    """

    def __init__(self) -> None:
        self.policy: TokenRounding | None = None
        self.counting = False
        self.balancing: Balancing | None = None
        self.last: ModelCall | None = None
        self.of_loss: list[ModelCall] | None = None
        self.said_top_k = False
        self.said_mask = False
        self.configs: Copies = []
        self.reports = self.reported = False
        self.recomputed: ModelCall | None = None
        self.made_compiled = False
        self.replayed_unseen = False
        self.num_routing_contexts = 0

    def __getstate__(self):  # a copy has had no calls
        return {**vars(self), "last": None, "of_loss": None, "recomputed": None, "num_routing_contexts": 0}


class ModelCall:
    """What a call of a model tells its routers.

    state: its model's settings; policy: theirs when it began. name: of the module called inside that model, "" for the
    whole; module: that module's id, None where Python's frames do not show it. gradients: whether the model's outermost
    call began with gradients on. attention_mask: [B, S] or None; token_types: [B, S] or None, see `Family.token_types`;
    both are the outer call's of the same model where this one has none. graph_task: the one that it began in, -1 for
    none; recomputing: whether checkpointing runs the module's forward again, as part of the call that did so first.
    outer: the call of a model that this call is part of; outermost: of those of the same model, the first.
    share: what part of the optimiser step's tokens the outermost call has, as far as its own loss says; loss_scale: what
    backward multiplies its balancing loss by, once it began; num_layer_losses: how many runs of
    layers that loss is the mean of. recorded, replayed: the experts that the
    outermost call notes ({layer: [indices [T, K] of each run]}), or takes in place of the routers' own. agreed: under
    expert parallelism, this rank's numbers of tokens and pairs, and the largest of all ranks. batch_group: the ranks that
    share the outermost call's batch, if stochastic rounding must draw the same there.
    """

    def __init__(
        self,
        state: PatchState,
        name: str,
        attention_mask: torch.Tensor | None,
        outer: ModelCall | None,
        part_of: ModelCall | None = None,
    ):
        self.state: PatchState = state
        self.name = name
        self.module: int | None = None
        self.outer: ModelCall | None = outer
        self.part_of = part_of
        self.policy: TokenRounding | None = state.policy if part_of is None else part_of.policy
        self.attention_mask: torch.Tensor | None = attention_mask
        if attention_mask is None and part_of is not None:
            self.attention_mask = part_of.attention_mask
        self.token_types: torch.Tensor | None = None if part_of is None else part_of.token_types
        self.gradients: bool = torch.is_grad_enabled() if part_of is None else part_of.gradients
        self.graph_task = -1
        self.recomputing: bool = part_of is not None and (part_of is not outer or part_of.recomputing)
        self.share: torch.Tensor | float = 1.0
        self.loss_scale: torch.Tensor | None = None
        self.num_layer_losses = 0
        self.recorded: dict[str, list[torch.Tensor]] | None = None
        self.replayed: ReplayedCall | None = None
        self.agreed: tuple[list[int], list[int]] | None = None
        self.batch_group: torch.distributed.ProcessGroup | None = None

    @property
    def outermost(self) -> ModelCall:
        """Not an attribute: a call that refers to itself would outlive its graph."""
        return self if self.part_of is None else self.part_of.outermost

    def is_inside(self, state: PatchState, name: str) -> bool:
        """Whether this module of that model is among those whose forwards this call is part of."""
        call: ModelCall | None = self
        while call is not None and call.state is state:
            if call.name == name:
                return True
            call = call.part_of
        return False


_thread = threading.local()  # call: the innermost one in progress
# graph task: the calls whose backward began there, in order
_in_backward: dict[int, list[weakref.ref[ModelCall]]] = {}
_changing = threading.Lock()  # of autograd's threads, one a device


def in_progress() -> ModelCall | None:
    """The innermost model call of this thread."""
    return getattr(_thread, "call", None)  # not a class default: torch.compile would not notice its change


def begin(
    state: PatchState, name: str, attention_mask: torch.Tensor | None, module: nn.Module | None = None
) -> ModelCall:
    """A model's forward begins: its call, which is part of the one around it unless that is of the same module.

    What interrupted calls left behind ends here (torch calls no hooks after KeyboardInterrupt).
    """
    compiling = torch.compiler.is_compiling()
    outer = in_progress()
    running = [] if compiling else running_modules()
    is_shown = bool(running) and running[0] == id(module)
    if outer is not None:
        outer = _still_running(outer, state, name, running[1:] if is_shown else None)
    part_of = outer if outer is not None and outer.state is state and not outer.is_inside(state, name) else None
    graph_task = -1 if compiling else current_graph_task_id()
    if part_of is None and graph_task != -1 and torch.is_grad_enabled():
        part_of = _announced(graph_task, state)
    if part_of is None and torch.is_grad_enabled():
        state.recomputed = None
    _thread.call = call = ModelCall(state, name, attention_mask, outer, part_of)
    if not compiling:
        call.graph_task, call.module = graph_task, id(module) if is_shown else None
    return call


def _still_running(innermost: ModelCall, state: PatchState, name: str, running: list[int] | None) -> ModelCall | None:
    """The innermost call in progress whose forward still runs, now that one of module `name` begins.

    Args:
        running: ids of the modules that run around it, or None where that is not known; then, and for calls of compiled
            code, no call is taken to be inside another of its own module.
    """
    outer: ModelCall | None = innermost
    call: ModelCall | None = innermost
    while call is not None:
        if running is None or call.module is None:
            interrupted = call.state is state and call.name == name
        else:
            interrupted = _num_calls(call, call.module) > running.count(call.module)
        if interrupted:
            outer = call.outer
        call = call.outer
    return outer


def _num_calls(innermost: ModelCall, module: int) -> int:
    """How many calls of that module there are from this one outwards."""
    count = 0
    call: ModelCall | None = innermost
    while call is not None:
        count += call.module == module
        call = call.outer
    return count


def end(state: PatchState, name: str) -> ModelCall | None:
    """A model's forward is over, by an error too: its call, or None where it never began."""
    call = in_progress()
    if call is None or call.state is not state or call.name != name:
        return None
    _thread.call = call.outer
    return call


def expect_backward(call: ModelCall) -> None:
    """Inside torch.compile: `call` ended, and its layers may be recomputed. The innermost of its calls counts."""
    state = call.state
    if state.recomputed is None or state.recomputed.outer is not call:
        state.recomputed, state.made_compiled = call, True


def begin_backward(call: ModelCall) -> None:
    """A gradient of the call's outputs arrived: what autograd recomputes of its model next, in this graph task, is of
    this call."""
    graph_task = current_graph_task_id()
    with _changing:
        announced = _in_backward.get(graph_task)
        if announced is None:
            for failed in [number for number, others in _in_backward.items() if not any(other() for other in others)]:
                del _in_backward[failed]  # autograd calls nothing back after errors
            announced = _in_backward[graph_task] = []
            at_end_of_backward(functools.partial(_end_backward, graph_task))
        if not announced or announced[-1]() is not call:
            announced.append(weakref.ref(call))
    call.state.recomputed, call.state.made_compiled = call, False


def _end_backward(graph_task: int) -> None:
    with _changing:
        announced = _in_backward.pop(graph_task, [])
    for reference in announced:
        call = reference()
        if call is not None and call.state.recomputed is call:
            call.state.recomputed = None


def _announced(graph_task: int, state: PatchState | None) -> ModelCall | None:
    """The call of that model, or of any where None, whose backward began last in this graph task."""
    for reference in reversed(_in_backward.get(graph_task, ())):
        call = reference()
        if call is not None and (state is None or call.state is state):
            return call
    return None


def _recomputed(graph_task: int, state: PatchState | None) -> ModelCall | None:
    """The call whose layers this graph task recomputes. Reentrant checkpointing inside reentrant checkpointing runs a
    graph task of its own, which no output of the call tells of: there it is the model's last call in any backward."""
    for number in (graph_task, *reversed(list(_in_backward))):
        call = _announced(number, state)
        if call is not None:
            return call
    return state.recomputed if state is not None and state.made_compiled else None


def current(state: PatchState | None = None) -> tuple[ModelCall | None, bool]:
    """The call of a model, or of any where None, that a router's or experts' forward is part of, and whether gradient
    checkpointing runs that forward again."""
    call = in_progress()
    while call is not None and state is not None and call.state is not state:
        call = call.outer
    if torch.compiler.is_compiling():  # autograd cannot be asked, but what is recomputed then runs outside any call
        if call is None and state is not None:
            return state.recomputed, True
    else:
        graph_task = current_graph_task_id()
        if graph_task != -1 and (call is None or call.graph_task != graph_task):
            return _recomputed(graph_task, state), True
    return call, call is not None and call.recomputing
