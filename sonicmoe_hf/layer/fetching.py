"""Where the op of `moe_experts` meets weights that live in host memory: sonicmoe_hf.streaming holds them, and gives
device tensors of their layer for as long as forward or backward of the op runs. What autograd saves is the host's
tensors, so backward fetches again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class StreamedLayer(Protocol):
    """A layer whose weights live in host memory."""

    def fetched(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Its weights on the device, by the names of the op's inputs, inside `with`."""

    def holds(self, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """Whether these host tensors are its weights."""


# by the address of the first projection's tensor in host memory
STREAMED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def fetched(inputs: Any) -> AbstractContextManager[Any]:
    """The op's inputs with weights that are on the device inside `with`; themselves where none are streamed."""
    layer = STREAMED.get(inputs.gate_up.data_ptr()) if STREAMED else None
    if layer is not None and layer.holds(inputs.gate_up, inputs.down):
        return _Fetched(inputs, layer.fetched())
    return contextlib.nullcontext(inputs)


class _Fetched:
    def __init__(self, inputs: Any, weights: AbstractContextManager[Mapping[str, torch.Tensor]]):
        self.inputs, self.weights = inputs, weights

    def __enter__(self):
        return self.inputs._replace(**self.weights.__enter__())

    def __exit__(self, *error):
        return self.weights.__exit__(*error)
