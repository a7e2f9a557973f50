"""HostWeight: experts' weights in host memory, as the frozen parameter on the GPU that PEFT, Transformers and torch
see."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kernels.packed import Quantized
from ..layer.packed_weight import PackedWeight
from .host_memory import digest_of
from .stream import HostLayer

FROZEN = (
    "experts in host memory are frozen and have no gradient; train adapters on them (sonicmoe_hf.lora_config), or load "
    "the model without experts_memory for full fine-tuning"
)
NOT_DENSE = (
    "{operation} takes a tensor on the device, but these experts live in host memory, which merging in memory, FSDP, "
    "DeepSpeed and other experts implementations than sonicmoe_hf do not take: replicate them by DDP, merge with "
    "sonicmoe_hf.merge_adapter, take weight.resident(), or load the model without experts_memory"
)
READ_ONLY = (
    "these experts live in host memory that the ranks of this host share, and do not take other values; load the weights "
    "in every rank by from_pretrained(..., experts_memory=...)"
)
NOT_SHARED = "experts in pinned host memory cannot be shared with other processes; load the model there"


def tensors_of(weight: torch.Tensor) -> Quantized:
    """List the tensors of a weight, packed or dense."""
    return weight.packed if isinstance(weight, PackedWeight) else Quantized(weight.detach(), None, None)  # type: ignore[arg-type]


class HostWeight(PackedWeight):
    """A weight of experts whose bytes are in pinned host memory, with the shape, dtype and device of the weight on the
    GPU that it stands for. `format` is "" where the bytes are those of the dense weight.

    Every copy of it is an ordinary weight: of clone() and deepcopy on its device, of pickle and to("cpu") on the CPU.
    An operation that would read it as a tensor raises RuntimeError.
    """

    layer: HostLayer | None
    unsupported, frozen = NOT_DENSE, FROZEN

    def __init__(self, packed: Quantized, format: str, dtype: torch.dtype, is_transposed: bool, device, layer=None):
        super().__init__(packed, format, dtype, is_transposed)
        self.layer = layer

    @classmethod
    def from_weight(cls, layer: HostLayer, projection: str, weight: torch.Tensor, is_transposed: bool) -> HostWeight:
        """Copy `weight`, packed or dense, to the layer's host memory. projection: "gate_up" or "down"."""
        format = weight.format if isinstance(weight, PackedWeight) else ""
        held = layer.hold(projection, tensors_of(weight))
        return cls(held, format, weight.dtype, is_transposed, layer.stream.device, layer)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Compute the dense weight on its device, in `dtype` (default: its own)."""
        weight = self.resident()
        return weight.dequantize(dtype) if isinstance(weight, PackedWeight) else weight.to(dtype or self.dtype)

    def _ordinary(self, packed: Quantized) -> torch.Tensor:
        if not self.format:
            return packed.codes
        return PackedWeight(packed, self.format, self.dtype, self.is_transposed)

    def _alias(self) -> HostWeight:
        return HostWeight(self.packed, self.format, self.dtype, self.is_transposed, self.device, self.layer)

    def _before_write(self, source: torch.Tensor) -> None:
        if self.layer is not None:
            if self.layer.has_one_copy and digest_of(tensors_of(source)) != digest_of(self.packed):
                raise RuntimeError(READ_ONLY)
            self.layer.stream.forget(self.layer)

    def _set_data(self, value: Any) -> None:
        if value.device != self.device:
            self._raise_unsupported("weight.data = ... of another device")
        if isinstance(value, HostWeight):
            self._hold(value.packed)
            self.layer = value.layer
        else:
            self.copy_(value)

    def __tensor_flatten__(self):
        names = [name for name in ("codes", "scales", "state") if getattr(self, name) is not None]
        return names, (self.format, self.dtype, self.is_transposed, self.device)

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return HostWeight(Quantized(tensors["codes"], tensors.get("scales"), tensors.get("state")), *context)

    def share_memory_(self):
        """Raise RuntimeError, because pinned memory belongs to one process."""
        raise RuntimeError(NOT_SHARED)

    def __reduce_ex__(self, protocol):
        if self.format:
            return super().__reduce_ex__(protocol)
        dense = self.codes.clone()
        return (nn.Parameter(dense, False) if isinstance(self, nn.Parameter) else dense).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"HostWeight({kind}, {self.format or 'dense'}, {tuple(self.shape)}, {self.dtype}, for {self.device})"
