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
from ..kernels.packed import Quantized
from .projection import Projection

# Up to so many rows for each expert, kernels read packed weights where they are, over the bus: they read the routed
# experts alone, and at half of a copy's bandwidth. Measured on an H200, a layer of Qwen3-30B-A3B (128 experts, NF4) by
# copies and over the bus: 8 rows 5.7 and 0.9 ms, 64 rows 5.8 and 3.4 ms, 512 rows 5.9 and 12.5 ms. Between the last
# two the experts hit decide, 1 - exp(-rows / experts) of all: at 0.75 they are half.
ROWS_OVER_THE_BUS = 0.75


class StreamedLayer(Protocol):
    """A layer whose weights live in host memory."""

    def fetched(self) -> AbstractContextManager[Mapping[str, Quantized]]:
        """Give its weights on the device, by "gate_up" and "down", inside `with`; of a dense weight `codes` is itself."""

    def mapped(self) -> Mapping[str, Quantized] | None:
        """Give its weights in host memory, as tensors that kernels of the device read; None where they cannot."""

    def holds(self, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """Tell whether these host tensors are its weights."""


# by the address of the first projection's tensor in host memory
STREAMED: weakref.WeakValueDictionary[int, StreamedLayer] = weakref.WeakValueDictionary()


def on_device(inputs: Any, rows: Rows, options: Any, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Give, inside `with`, the op's inputs as the backend's kernels read them, with weights in this dtype."""
    # eager products are PyTorch's; kernels know no autocast, and the switch takes time
    is_cast = options.backend == "eager" and torch.is_autocast_enabled(inputs.weight.device.type)
    if is_cast or STREAMED:
        return _without_autocast(inputs, rows, options, dtype)
    return contextlib.nullcontext(inputs)


@contextlib.contextmanager
def _without_autocast(inputs: Any, rows: Rows, options: Any, dtype: torch.dtype):
    with torch.autocast(inputs.weight.device.type, enabled=False), fetched(inputs, rows, options, dtype) as inputs:
        yield inputs


def fetched(inputs: Any, rows: Rows, options: Any, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Give the op's inputs with weights that kernels of the device read inside `with`, dense ones in `dtype`; the
    inputs themselves where none are in host memory."""
    gate_up, down = inputs.gate_up, inputs.down
    layer = STREAMED.get(gate_up.weight.data_ptr())
    if layer is None or not layer.holds(gate_up.weight, down.weight):
        # copy what no layer holds: one weight of two was replaced, or a hook copied what autograd saved
        copies = {"gate_up": _copied(gate_up, inputs.weight.device), "down": _copied(down, inputs.weight.device)}
        return contextlib.nullcontext(_replace(inputs, copies, dtype))
    # Dense weights, and packed ones of FP8 products, go through TMA, which has not been tried over the bus.
    is_packed = gate_up.format and down.format and not options.fp8
    has_few_rows = rows.token.numel() <= ROWS_OVER_THE_BUS * (rows.offsets.numel() - 1)
    if is_packed and has_few_rows and (mapped := layer.mapped()) is not None:
        return contextlib.nullcontext(_replace(inputs, mapped, dtype))
    return _replaced(inputs, layer.fetched(), dtype)


def _copied(projection: Projection, device: torch.device) -> Quantized:
    """Copy the weight to the device where it is not there."""
    weight, scales, state, *_ = projection
    return Quantized(*(part if part is None else part.to(device) for part in (weight, scales, state)))  # type: ignore[arg-type]


@contextlib.contextmanager
def _replaced(inputs: Any, weights: AbstractContextManager[Mapping[str, Quantized]], dtype: torch.dtype):
    with weights as on_device:
        yield _replace(inputs, on_device, dtype)


def _replace(inputs: Any, weights: Mapping[str, Quantized], dtype: torch.dtype) -> Any:
    """Exchange the stored tensors of the projections, and cast dense ones, as autocast casts those on the device before
    the op."""
    for name, stored in weights.items():
        projection = getattr(inputs, name)
        if not projection.format:
            stored = Quantized(stored.codes.to(dtype), *stored[1:])
        inputs = inputs._replace(**{name: Projection(*stored, *projection[len(stored) :])})
    return inputs
