"""Packed sequences as position_ids tell them: where a position is not its predecessor's plus 1, a sequence begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from transformers.utils import is_tracing

from .packing import sequence_starts

T = TypeVar("T")


class LastAnswer(Generic[T]):
    """Caches an answer that was computed from the last tensor, for a model's other layers, which are given the same
    tensor: the computation waits for the GPU. A tensor of inference_mode has no version that would show a change in
    place, so it is computed for every layer."""

    def __init__(self) -> None:
        self._of: weakref.ref | None = None
        self._state: tuple[int, int] | None = None  # the tensor's version, and the batch's size
        self._answer: Any = None

    def get(self, tensor: torch.Tensor, batch_size: int, compute: Callable[[], T]) -> T:
        """Call `compute`, unless the last call had the same tensor, unchanged: then return what it returned."""
        if tensor.is_inference():
            return compute()
        state = tensor._version, batch_size
        if self._of is None or self._of() is not tensor or self._state != state:
            with torch.inference_mode(False):  # a later step may save it for its backward
                self._answer = compute()
            self._of, self._state = weakref.ref(tensor), state
        return self._answer


_last: LastAnswer[torch.Tensor | None] = LastAnswer()


def begins_of(position_ids: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Find the tokens that begin a sequence: bool [B, T], of position_ids [B or 1, T]."""
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
    return begins.expand(batch_size, -1)


def are_packed(given: dict[str, Any]) -> bool:
    """Tell whether a layer's position_ids [B, S], if it has any, begin sequences inside a row."""
    position_ids = given.get("position_ids")
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2 or is_tracing(position_ids):
        return False  # a tracer knows no values
    return starts_of(position_ids, position_ids.shape[0]) is not None


def starts_of(position_ids: torch.Tensor, batch_size: int) -> torch.Tensor | None:
    """Compute the `sequence_starts` of position_ids, once for all layers of a model. In a graph of torch.compile each
    layer calls the op on the same tensor, and one of these calls remains."""

    def compute():
        return sequence_starts(begins_of(position_ids, batch_size))

    return compute() if torch.compiler.is_compiling() else _last.get(position_ids, batch_size, compute)
