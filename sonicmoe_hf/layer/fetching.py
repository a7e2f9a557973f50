"""Weights in host memory as the op of `moe_experts` reads them: sonicmoe_hf.streaming holds them, and gives device
tensors of their layer for as long as forward or backward of the op runs. Autograd saves the host's tensors, so backward
fetches again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..kernels.interface import Rows

# Up to so many rows for each expert, kernels read packed weights where they are, over the bus: they read the routed
# experts alone, and at half of a copy's bandwidth. Measured on an H200, a layer of Qwen3-30B-A3B (128 experts, NF4) by
# copies and over the bus: 8 rows 5.7 and 0.9 ms, 64 rows 5.8 and 3.4 ms, 512 rows 5.9 and 12.5 ms. Between the last
# two the experts hit decide, 1 - exp(-rows / experts) of all: at 0.75 they are half.
ROWS_OVER_THE_BUS = 0.75


class StreamedLayer(Protocol):
    """A layer whose weights live in host memory."""

    def fetched(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Give its weights on the device, by the names of the op's inputs, inside `with`."""

    def mapped(self) -> Mapping[str, torch.Tensor] | None:
        """Give its weights in host memory, as tensors that kernels of the device read; None where they cannot."""

    def holds(self, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """Tell whether these host tensors are its weights."""


# by the address of the first projection's tensor in host memory
STREAMED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
WEIGHTS = ("gate_up", "down")
STORED = tuple(weight + part for weight in WEIGHTS for part in ("", "_scales", "_state"))  # names of the op's inputs


def fetched(inputs: Any, rows: Rows, options: Any, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Give the op's inputs with weights that kernels of the device read inside `with`, dense ones in `dtype`; the inputs
    themselves where none are in host memory."""
    layer = STREAMED.get(inputs.gate_up.data_ptr())
    if layer is None or not layer.holds(inputs.gate_up, inputs.down):
        return contextlib.nullcontext(_copied(inputs, dtype))
    if _reads_over_the_bus(rows, options) and (mapped := layer.mapped()) is not None:
        return contextlib.nullcontext(inputs._replace(**mapped))
    return _replaced(inputs, layer.fetched(), dtype)


def _copied(inputs: Any, dtype: torch.dtype) -> Any:
    """Copy weights to the device that no layer holds: one of two was replaced, or a hook copied what autograd saved."""
    device = inputs.weight.device
    if inputs.gate_up.device != device or inputs.down.device != device:
        stored = {name: tensor for name in STORED if (tensor := getattr(inputs, name)) is not None}
        inputs = inputs._replace(**{name: tensor.to(device) for name, tensor in stored.items()})
    return _in_dtype(inputs, dtype)


def _reads_over_the_bus(rows: Rows, options: Any) -> bool:
    """Tell whether reading the routed experts where they are takes less than copying the layer. Dense weights, and packed
    ones of FP8 products, go through TMA, which has not been tried over the bus."""
    is_packed = options.gate_up_format and options.down_format and not options.fp8
    return bool(is_packed) and rows.token.numel() <= ROWS_OVER_THE_BUS * (rows.offsets.numel() - 1)


@contextlib.contextmanager
def _replaced(inputs: Any, weights: AbstractContextManager[Mapping[str, torch.Tensor]], dtype: torch.dtype):
    with weights as on_device:
        yield _in_dtype(inputs._replace(**on_device), dtype)


def _in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """Cast dense weights, as autocast casts those on the device before the op."""
    for name in WEIGHTS:
        weight = getattr(inputs, name)
        if weight.dtype != dtype and weight.is_floating_point():
            inputs = inputs._replace(**{name: weight.to(dtype)})
    return inputs
