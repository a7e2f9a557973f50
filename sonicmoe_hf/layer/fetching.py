"""Weights in host memory, as the op of `moe_experts` reads them: while its forward or backward runs,
sonicmoe_hf.streaming gives it device tensors of the layer's weights. Autograd saves the host's tensors, so backward
fetches again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..kernels.packed import Quantized
from .call import LayerCall
from .projection import Projection

# Up to so many rows for each expert, kernels read packed weights where they are, over the bus: they read the routed
# experts alone, and at half of a copy's bandwidth. Measured on an H200, a layer of Qwen3-30B-A3B (128 experts, NF4) by
# copies and over the bus: 8 rows 5.7 and 0.9 ms, 64 rows 5.8 and 3.4 ms, 512 rows 5.9 and 12.5 ms. Between the last
# two the experts hit decide, 1 - exp(-rows / experts) of all: at 0.75 they are half.
ROWS_OVER_THE_BUS = 0.75


class StreamedLayer(Protocol):
    """A layer whose weights live in host memory."""

    def fetch(self) -> AbstractContextManager[Mapping[str, Quantized]]:
        """Copy the layer's weights to the device, by "gate_up" and "down", inside `with`; of a dense weight `codes` is
        itself."""

    def map(self) -> Mapping[str, Quantized] | None:
        """Map the layer's weights in host memory, as tensors that kernels of the device read; None where they cannot."""

    def holds(self, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """Tell whether these host tensors are its weights."""


# by the address of the first projection's tensor in host memory
STREAMED: weakref.WeakValueDictionary[int, StreamedLayer] = weakref.WeakValueDictionary()


def on_device(call: LayerCall, dtype: torch.dtype) -> AbstractContextManager[LayerCall]:
    """Make, inside `with`, the call as the backend's kernels read it, with weights in this dtype."""
    # eager products are PyTorch's; kernels know no autocast, and the switch takes time
    device = call.weight.device.type
    is_cast = call.options.backend == "eager" and torch.is_autocast_enabled(device)
    if is_cast or STREAMED:
        return _without_autocast(call, dtype)
    return contextlib.nullcontext(call)


@contextlib.contextmanager
def _without_autocast(call: LayerCall, dtype: torch.dtype) -> Iterator[LayerCall]:
    with torch.autocast(call.weight.device.type, enabled=False), with_device_weights(call, dtype) as call:
        yield call


def with_device_weights(call: LayerCall, dtype: torch.dtype) -> AbstractContextManager[LayerCall]:
    """Make the call with weights that kernels of the device read inside `with`, dense ones in `dtype`; the call itself
    where none are in host memory."""
    gate_up, down = call.gate_up, call.down
    layer = STREAMED.get(gate_up.weight.data_ptr())
    if layer is None or not layer.holds(gate_up.weight, down.weight):
        # copy what no layer holds: one weight of two was replaced, or a hook copied what autograd saved
        copies = {
            "gate_up": _copy_to_device(gate_up, call.weight.device),
            "down": _copy_to_device(down, call.weight.device),
        }
        return contextlib.nullcontext(_replace_weights(call, copies, dtype))
    # Dense weights, and packed ones of FP8 products, go through TMA, which has not been tried over the bus.
    is_packed = gate_up.format and down.format and not call.options.fp8
    rows = call.rows
    has_few_rows = rows.token.numel() <= ROWS_OVER_THE_BUS * (rows.offsets.numel() - 1)
    if is_packed and has_few_rows and (mapped := layer.map()) is not None:
        return contextlib.nullcontext(_replace_weights(call, mapped, dtype))
    return _with_weights(call, layer.fetch(), dtype)


def _copy_to_device(projection: Projection, device: torch.device) -> Quantized:
    """Copy the weight to the device where it is not there."""
    tensors = projection.quantized()
    return Quantized(*(tensor if tensor is None else tensor.to(device) for tensor in tensors))  # type: ignore[arg-type]


@contextlib.contextmanager
def _with_weights(
    call: LayerCall, weights: AbstractContextManager[Mapping[str, Quantized]], dtype: torch.dtype
) -> Iterator[LayerCall]:
    """Make the call with these weights inside `with`, which is as long as they are there."""
    with weights as on_device:
        yield _replace_weights(call, on_device, dtype)


def _replace_weights(call: LayerCall, weights: Mapping[str, Quantized], dtype: torch.dtype) -> LayerCall:
    """Replace the weights of both projections; cast dense ones, as autocast casts those on the device."""

    def replace_weight(projection: Projection, weight: Quantized) -> Projection:
        codes = weight.codes if projection.format else weight.codes.to(dtype)
        return projection._replace(weight=codes, scales=weight.scales, state=weight.state)

    return call._replace(
        gate_up=replace_weight(call.gate_up, weights["gate_up"]), down=replace_weight(call.down, weights["down"])
    )
