"""HostWeight: experts' weights in host memory, as the frozen parameter on the GPU that they are to everybody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kernels.quantized import Quantized
from ..layer.packed_weight import PackedWeight, alias, each
from ..private.torch import to_copy, wrapper_of
from .stream import HostLayer

aten = torch.ops.aten
FROZEN = (
    "experts in host memory are frozen and have no gradient; train adapters on them (sonicmoe_hf.lora_config), or load "
    "the model without experts_memory for full fine-tuning"
)
NOT_DENSE = (
    "{operation} takes a tensor on the device, but these experts live in host memory, which merging in memory, FSDP, "
    "DeepSpeed and other experts implementations than sonicmoe_hf do not take: replicate them by DDP, merge with "
    "sonicmoe_hf.merge_adapter, take weight.resident(), or load the model without experts_memory"
)
NOT_SHARED = "experts in pinned host memory cannot be shared with other processes; load the model there"


class Facts(NamedTuple):
    """What a weight shows of itself."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class HostWeight(PackedWeight):
    """A weight of experts whose bytes are in pinned host memory, with the shape, dtype and device of the weight on the
    GPU that it stands for. `format` is "" where the bytes are those of the dense weight.

    Every copy of it is an ordinary weight: of clone() and deepcopy on its device, of pickle and to("cpu") on the CPU.
    What would read it as a tensor raises RuntimeError.
    """

    layer: HostLayer | None
    refusal, frozen = NOT_DENSE, FROZEN

    @staticmethod
    def __new__(cls, packed: Quantized, format: str, facts: Facts, is_transposed: bool, layer=None):
        return wrapper_of(cls, facts.shape, dtype=facts.dtype, device=facts.device)

    def __init__(self, packed: Quantized, format: str, facts: Facts, is_transposed: bool, layer=None):
        self._hold(packed)
        self.format, self.is_transposed, self.layer = format, is_transposed, layer

    @classmethod
    def held(cls, layer: HostLayer, projection: str, weight: torch.Tensor, is_transposed: bool) -> HostWeight:
        """`weight`, packed or dense, with its bytes moved to the layer's host memory. projection: "gate_up" or "down"."""
        if isinstance(weight, PackedWeight):
            packed, format = weight.packed, weight.format
        else:
            packed, format = Quantized(weight.detach().contiguous(), None, None), ""  # type: ignore[arg-type]
        facts = Facts(weight.shape, weight.dtype, layer.stream.device)
        return cls(layer.hold(projection, packed), format, facts, is_transposed, layer)

    def resident(self, device: torch.device | str | None = None) -> torch.Tensor:
        """A copy on a device (default: its own): a PackedWeight, or a dense tensor."""
        parts: list[Any] = [
            None if part is None else part.to(device=device or self.device, copy=True) for part in self.packed
        ]
        codes, scales, state = parts
        if not self.format:
            return codes
        return PackedWeight(Quantized(codes, scales, state), self.format, self.dtype, self.is_transposed)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The dense weight on its device, in `dtype` (default: its own)."""
        weight = self.resident()
        return weight.dequantize(dtype) if isinstance(weight, PackedWeight) else weight.to(dtype or self.dtype)

    def requantized(self, format: str, *args, **kwargs) -> PackedWeight:
        """As PackedWeight's, on its device. Raises RuntimeError of a dense weight."""
        weight = self.resident()
        if not isinstance(weight, PackedWeight):
            self._refuse("requantized")
        return weight.requantized(format, *args, **kwargs)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> HostWeight:
        facts = Facts(self.shape, self.dtype, self.device)
        return HostWeight(each(self.packed, function), self.format, facts, self.is_transposed, self.layer)

    def _is_like(self, other) -> bool:
        return False  # what `data` would exchange: the host's bytes stay where they are

    def __tensor_flatten__(self):
        names = [name for name in ("codes", "scales", "state") if getattr(self, name) is not None]
        return names, (self.format, self.dtype, self.device, self.is_transposed)

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        format, dtype, device, is_transposed = context
        packed = Quantized(tensors["codes"], tensors.get("scales"), tensors.get("state"))
        return HostWeight(packed, format, Facts(torch.Size(size), dtype, device), is_transposed)

    def share_memory_(self):
        """Raises RuntimeError: pinned memory belongs to one process."""
        raise RuntimeError(NOT_SHARED)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = self.resident()
            memo[id(self)] = nn.Parameter(copied, False) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        if self.format:
            return super().__reduce_ex__(protocol)
        dense = self.codes.clone()
        return (nn.Parameter(dense, False) if isinstance(self, nn.Parameter) else dense).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"HostWeight({kind}, {self.format or 'dense'}, {tuple(self.shape)}, {self.dtype}, for {self.device})"


def _to(weight, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    """Casts leave it as it is, as they do packed weights; elsewhere is an ordinary copy."""
    return alias(weight) if device is None or torch.device(device) == weight.device else weight.resident(device)


def _clone(weight, *, memory_format=None):
    return weight.resident()


def _empty_like(weight, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return torch.empty_like(weight.resident("meta"), device=device or weight.device)


def _parts(weight):
    return weight.packed if isinstance(weight, PackedWeight) else (weight, None, None)


def _copy(weight, source, non_blocking=False):
    format = weight.format if isinstance(weight, PackedWeight) else ""
    if weight.shape != source.shape or format != (source.format if isinstance(source, PackedWeight) else ""):
        return NotImplemented
    if isinstance(weight, HostWeight) and weight.layer is not None:
        weight.layer.stream.forget(weight.layer)  # before the host's bytes change
    for part, values in zip(_parts(weight), _parts(source)):
        if part is not None:
            part.copy_(values)
    return weight


HostWeight.operations = {
    aten.detach.default: alias,
    aten.alias.default: alias,
    aten.clone.default: _clone,
    to_copy: _to,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy,
}
