"""Packed sequences as position_ids tell them: where a position is not its predecessor's plus 1, a sequence begins."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from transformers.utils import is_tracing

from .packing import sequence_starts


class _Answer(NamedTuple):
    position_ids: weakref.ref
    state: tuple[int, int]  # the tensor's version, and the batch's size
    starts: torch.Tensor | None


_last: _Answer | None = None


def begins_of(position_ids: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Find the tokens that begin a sequence: bool [B, T], of position_ids [B or 1, T]."""
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1
    return begins.expand(batch_size, -1)


def are_packed(given: dict[str, Any]) -> bool:
    """Tell whether a layer's position_ids [B, S], if it has any, begin sequences inside a row."""
    position_ids = given.get("position_ids")
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2 or is_tracing(position_ids):
        return False  # where something traces, nobody knows
    return starts_of(position_ids, position_ids.shape[0]) is not None


def starts_of(position_ids: torch.Tensor, batch_size: int) -> torch.Tensor | None:
    """Compute `sequence_starts` of them, kept for the model's other layers, which are given the same tensor, because it
    waits for the GPU. torch.compile keeps one of the layers' ops. Under inference_mode it is computed for every layer,
    because such a tensor has no version that would show a change in place."""
    global _last
    if torch.compiler.is_compiling() or position_ids.is_inference():
        return sequence_starts(begins_of(position_ids, batch_size))
    last, state = _last, (position_ids._version, batch_size)
    if last is not None and last.position_ids() is position_ids and last.state == state:
        return last.starts
    with torch.inference_mode(False):  # a later step may save them for its backward
        starts = sequence_starts(begins_of(position_ids, batch_size))
    _last = _Answer(weakref.ref(position_ids), state, starts)
    return starts
