"""The state of a model call: which thread runs it, which of its layers autograd recomputes. Hooks read it and hold none.

A call belongs to the thread that makes it, so it is kept in a threading.local. Backward runs in autograd's own threads,
which see no thread-locals of others: there a call belongs to the graph task that its outputs' gradients arrived in.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ..config import TokenRounding
from ..private.torch import current_graph_task_id

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .balance import Balancing
    from .recorded import RecordedRouting, Replay


class PatchState:
    """The settings that all hooks of one model share.

    policy: token rounding, or None for top-k. counting: whether routers count their loads. balancing: what they do for
    balance, or None. said_top_k, said_mask: whether it was said that calls are too small for token rounding, and that a
    mask does not fit. last: the outermost call that ended last, while `balancing` wants its scale. of_loss: those that
    ended since a Trainer began to compute its loss, None outside. recording, replaying: where calls note which experts
    they use, and take them from, if they do.
    configs: (the config that the model was built from, its own copy of it).
    """

    def __init__(self) -> None:
        self.policy: TokenRounding | None = None
        self.counting = False
        self.balancing: Balancing | None = None
        self.last: ModelCall | None = None
        self.of_loss: list[ModelCall] | None = None
        self.recording: RecordedRouting | None = None
        self.replaying: Replay | None = None
        self.said_top_k = False
        self.said_mask = False
        self.configs: list[tuple[PreTrainedConfig, PreTrainedConfig]] = []


class ModelCall:
    """What a call of a model tells its routers.

    state: its model's settings; policy: theirs when it began. name: of the module called inside that model, "" for the
    whole. gradients: whether the model's outermost call began with gradients on. attention_mask: [B, S] or None;
    token_types: [B, S] or None, see `Family.token_types`; both are the outer call's of the same model where this one has
    none.
    outer: the call of a model that this call is part of; outermost: of those of the same model, the first.
    share: what part of the optimiser step's tokens the outermost call has, as far as its own loss says; loss_scale: what
    backward multiplies its balancing loss by, once it began. recorded, replayed: {layer: indices [T, K]} that
    the outermost call notes, or takes in place of the routers' own. agreed: under expert parallelism, this
    rank's numbers of tokens and pairs, and the largest of all ranks. batch_group: the ranks that share the outermost
    call's batch, if stochastic rounding must draw the same there.
    """

    def __init__(self, state: PatchState, name: str, attention_mask: torch.Tensor | None, outer: ModelCall | None):
        self.state: PatchState = state
        self.name = name
        self.policy = state.policy
        self.outer: ModelCall | None = outer
        part_of = outer if outer is not None and outer.state is state else None
        self.attention_mask: torch.Tensor | None = attention_mask
        if attention_mask is None and part_of is not None:
            self.attention_mask = part_of.attention_mask
        self.token_types: torch.Tensor | None = part_of.token_types if part_of else None
        self.gradients: bool = torch.is_grad_enabled() if part_of is None else part_of.gradients
        self.outermost: ModelCall = self if part_of is None else part_of.outermost
        self.share: torch.Tensor | float = 1.0
        self.loss_scale: torch.Tensor | None = None
        self.recorded: dict[str, torch.Tensor] | None = None
        self.replayed: dict[str, torch.Tensor] | None = None
        self.agreed: tuple[list[int], list[int]] | None = None
        self.batch_group: torch.distributed.ProcessGroup | None = None


class _Latest:
    """For compiled code, which asks autograd nothing: the last call whose backward began; `made_compiled`: or, of a
    compiled model, which cannot hold hooks of tensors, the last one made."""

    def __init__(self) -> None:
        self.call: ModelCall | None = None
        self.made_compiled = False


# call: the innermost one in progress; graph_task: the last one that recomputed layers here
_thread = threading.local()
_latest = _Latest()
_of_graph_task: weakref.WeakValueDictionary[int, ModelCall] = weakref.WeakValueDictionary()


def in_progress() -> ModelCall | None:
    """The innermost model call of this thread."""
    return getattr(_thread, "call", None)  # not a class default: torch.compile would not notice its change


def begin(state: PatchState, name: str, attention_mask: torch.Tensor | None) -> ModelCall:
    """A model's forward begins: its call. What an interrupted call of the same module left behind ends here."""
    outer = left = in_progress()
    while left is not None:
        if left.state is state and left.name == name:
            outer = left.outer
        left = left.outer
    _thread.call = call = ModelCall(state, name, attention_mask, outer)
    return call


def end(state: PatchState, name: str) -> ModelCall | None:
    """A model's forward is over, by an error too: its call, or None where it never began."""
    call = in_progress()
    if call is None or call.state is not state or call.name != name:
        return None
    _thread.call = call.outer
    return call


def expect_backward(call: ModelCall) -> None:
    """Inside torch.compile: `call` ended, and its layers may be recomputed. The innermost of its calls counts."""
    if _latest.call is None or _latest.call.outer is not call:
        _latest.call, _latest.made_compiled = call, True


def begin_backward(call: ModelCall) -> None:
    """A gradient of the call's outputs arrived: what autograd recomputes next, in this graph task, is of this call.

    The entry lives as long as the call's graph, whose hooks hold the call.
    """
    _of_graph_task[current_graph_task_id()] = call
    _latest.call, _latest.made_compiled = call, False


def _recomputed() -> ModelCall | None:
    """The call whose layers this thread recomputes. Reentrant checkpointing inside reentrant checkpointing runs a graph
    task of its own, in the thread of the outer one."""
    graph_task = current_graph_task_id()
    call = _of_graph_task.get(graph_task)
    if call is not None:
        _thread.graph_task = graph_task
        return call
    made_compiled = _latest.call if _latest.made_compiled else None
    return _of_graph_task.get(getattr(_thread, "graph_task", -1), made_compiled)


def current() -> tuple[ModelCall | None, bool]:
    """The call that a router's forward is part of, and whether gradient checkpointing runs that forward again."""
    if torch.compiler.is_compiling():  # autograd cannot be asked, but what is recomputed then runs outside any call
        call = in_progress()
        return (_latest.call, True) if call is None else (call, False)
    if current_graph_task_id() == -1:
        return in_progress(), False
    return _recomputed(), True
