"""PackedWeight: experts' weights in 4 or 8 bits, as the parameter of dense shape that Transformers and PEFT see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from ..kernels.packed import FORMATS, Quantized
from ..private.torch import to_copy, without_torch_function, wrapper_of

aten = torch.ops.aten
FROZEN = (
    "experts packed as {format} are frozen and have no gradient; train adapters on them (peft.LoraConfig("
    'target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])), or load the model in bf16 for full '
    "fine-tuning"
)
NOT_DENSE = (
    "{operation} takes a dense tensor, but these experts are packed as {format}, which Transformers' experts, merging "
    "in memory and FSDP1 do not take: compute with sonicmoe_hf (patch_model, SonicMoEExperts), shard "
    "with FSDP2 (fully_shard), or take weight.dequantize()"
)


OFFLOADED = (
    "accelerate (cpu_offload, disk_offload, dispatch_model) cannot offload experts that are packed or in host memory; "
    'keep them on the GPU, or in host memory by sonicmoe_hf (experts_memory="8GiB")'
)


def map_tensors(packed: Quantized, function: Callable[[torch.Tensor], torch.Tensor]) -> Quantized:
    """Apply a function to each tensor of a packed weight."""
    return Quantized(*(None if tensor is None else function(tensor) for tensor in packed))  # type: ignore[arg-type]


class PackedWeight(torch.Tensor):
    """A weight of experts in 4 or 8 bits with the shape and dtype of the dense weight that it stands for.

    Shape: [E, N, K], or [E, K, N] if `is_transposed` (gpt-oss). dtype: what experts compute in; casts (`.half()`,
    `.to(torch.float32)`) leave it as it is, moves and copies move and copy its tensors. It is never trained, and
    every operation that would read it as a dense tensor raises RuntimeError.

    codes, scales, state: its tensors (kernels.packed.Quantized), of the transpose if `is_transposed`.
    format: "nf4", "mxfp4", "fp8", "nvfp4", "int4" or "uint4"; "" of a HostWeight whose codes are the dense weight.
    expanded: the dense weight, where `expanded_memory` keeps it beside them.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    state: torch.Tensor | None
    expanded: torch.Tensor | None
    format: str
    is_transposed: bool
    unsupported, frozen = NOT_DENSE, FROZEN
    operations: ClassVar[dict[Any, Callable[..., Any]]] = {}  # by torch's op: the function that takes its place

    @staticmethod
    def __new__(cls, packed: Quantized, format="", dtype=None, is_transposed=False, device=None, *others, **options):
        if not isinstance(packed, Quantized):  # accelerate makes a tensor of the meta device a parameter of this class
            raise RuntimeError(OFFLOADED)
        shape = FORMATS[format].shape(packed) if format else packed.codes.shape
        if format and is_transposed:
            shape = shape[0], shape[2], shape[1]
        return wrapper_of(cls, shape, dtype=dtype, device=packed.codes.device if device is None else device)

    def __init__(self, packed: Quantized, format: str, dtype: torch.dtype, is_transposed: bool = False):
        self._hold(packed)
        self.format, self.is_transposed = format, is_transposed

    def _hold(self, packed: Quantized) -> None:
        self.codes, self.scales, self.state = packed
        self.expanded = None

    @property
    def packed(self) -> Quantized:
        """The codes, scales and state."""
        return Quantized(self.codes, self.scales, self.state)

    @classmethod
    def quantize(
        cls,
        weight: torch.Tensor,
        format: str,
        is_transposed: bool = False,
        order: str = "whole",
        mean: Callable[[torch.Tensor], torch.Tensor] = torch.mean,
    ) -> PackedWeight:
        """Pack `weight` [E, N, K] ([E, K, N] if `is_transposed`) on its device.

        order: "concatenated" if its first N/2 rows are gates and the others ups, "interleaved" if gates and ups come in
            turn; fp8 and nvfp4 give each half blocks or a scale of its own.
        mean: of NF4's scales; kernels.packed says where it is another's.
        Raises:
            ValueError: NaN or infinity, or K no multiple of the format's block.
        """
        weight = weight.detach()
        packed = FORMATS[format].quantize(weight.transpose(1, 2) if is_transposed else weight, order, mean)
        return cls(packed, format, weight.dtype, is_transposed)

    @classmethod
    def of(cls, packed: Quantized, format: str, dtype: torch.dtype, is_transposed: bool = False) -> PackedWeight:
        """Make a weight of the tensors that store it. Raises ValueError where they do not fit together."""
        packed = map_tensors(packed, torch.Tensor.contiguous)
        FORMATS[format].check_shapes(packed)
        return cls(packed, format, dtype, is_transposed)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Compute the dense weight, of this shape, in `dtype` (default: its own)."""
        dense = FORMATS[self.format].dequantize(self.packed, dtype or self.dtype)
        return dense.transpose(1, 2) if self.is_transposed else dense

    def resident(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Copy the weight to a device (default: its own), as an ordinary one."""
        return self._ordinary(
            map_tensors(self.packed, lambda tensor: tensor.to(device=device or self.device, copy=True))
        )

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The number of bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.packed if tensor is not None)

    def element_size(self) -> float:  # type: ignore[override]
        """Compute the bytes held for each entry, less than one: model.get_memory_footprint() multiplies them by
        numel()."""
        return self.nbytes / self.numel()

    def _ordinary(self, packed: Quantized) -> torch.Tensor:
        """Make a weight of other tensors; a copy of a HostWeight is no HostWeight."""
        return type(self)(packed, self.format, self.dtype, self.is_transposed)

    def _alias(self) -> torch.Tensor:
        return self._ordinary(self.packed)

    def _before_write(self, source: torch.Tensor) -> None:
        """Prepare for a change of the tensors' bytes to those of `source`."""

    def _set_data(self, value: Any) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # of the class it is a descriptor
        self._hold(
            map_tensors(value.packed, lambda tensor: tensor.to(value.device))
        )  # a HostWeight's tensors are elsewhere

    __torch_function__ = without_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        operation = cls.operations.get(function)
        if operation is not None:
            result = operation(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        given = (*args, *(kwargs or {}).values())
        listed = (argument if isinstance(argument, (list, tuple)) else (argument,) for argument in given)
        first = next(tensor for tensors in listed for tensor in tensors if isinstance(tensor, cls))
        first._raise_unsupported(function)

    def _raise_unsupported(self, operation: Any) -> NoReturn:
        raise RuntimeError(self.unsupported.format(operation=operation, format=self.format))

    def __tensor_flatten__(self):
        names = ["codes", "scales"] if self.state is None else ["codes", "scales", "state"]
        return names, (self.format, self.dtype, self.is_transposed)

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return PackedWeight(Quantized(tensors["codes"], tensors["scales"], tensors.get("state")), *context)

    # `weight.data = ...` would exchange the shape and the device, and leave its tensors
    @property  # type: ignore[override]
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value):
        if kind_of(self) != kind_of(value):
            self._raise_unsupported("weight.data = ...")
        self._set_data(value)

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool):
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> PackedWeight:
        """Change nothing, and return the weight. Raises RuntimeError if a gradient is asked for."""
        if requires_grad:
            raise RuntimeError(self.frozen.format(format=self.format))
        return self

    def share_memory_(self) -> PackedWeight:
        """Move its tensors to memory that processes share."""
        self._hold(map_tensors(self.packed, torch.Tensor.share_memory_))
        return self

    def is_shared(self) -> bool:
        """Tell whether `share_memory_` was called, or the weight is on a GPU."""
        return self.codes.is_shared()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = self.resident()
            memo[id(self)] = nn.Parameter(copied, requires_grad=False) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        is_parameter = isinstance(self, nn.Parameter)
        return _rebuilt, (*self.packed, self.format, self.dtype, self.is_transposed, is_parameter)

    def __repr__(self, *, tensor_contents=None):
        kind = "Parameter" if isinstance(self, nn.Parameter) else "tensor"
        return f"PackedWeight({kind}, {self.format}, {tuple(self.shape)}, {self.dtype}, {self.device})"


def _rebuilt(codes, scales, state, format, dtype, is_transposed, is_parameter):
    weight = PackedWeight.of(Quantized(codes, scales, state), format, dtype, is_transposed)
    return as_parameter(weight) if is_parameter else weight


def as_parameter(weight: torch.Tensor) -> nn.Parameter:
    """Make a packed weight a parameter of a module."""
    return nn.Parameter(weight, requires_grad=False)


def kind_of(weight: torch.Tensor) -> tuple[torch.Size, str, bool]:
    """Describe a weight as (shape, format, is_transposed): weights of one kind have like tensors. A dense one's format
    is ""."""
    format = weight.format if isinstance(weight, PackedWeight) else ""
    return weight.shape, format, bool(format) and weight.is_transposed  # type: ignore[attr-defined]


def alias(weight: PackedWeight, *_) -> torch.Tensor:
    """Make another weight over the same tensors."""
    return weight._alias()


def _clone(weight, *, memory_format=None):
    return weight.resident()


def _to(weight, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    """Copy to another device; casts leave the weight as it is, and so does a move to its own device."""
    return alias(weight) if device is None or torch.device(device) == weight.device else weight.resident(device)


def _empty_like(weight, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    device = weight.device if device is None else device
    return weight._ordinary(map_tensors(weight.packed, lambda tensor: torch.empty_like(tensor, device=device)))


def _tensors_of(weight):
    """List the tensors that store a weight: of a dense one itself."""
    return weight.packed if isinstance(weight, PackedWeight) else (weight,)


def _copy(weight, source, non_blocking=False):
    if kind_of(weight) != kind_of(source):
        return NotImplemented
    if isinstance(weight, PackedWeight):
        weight._before_write(source)
    for tensor, value in zip(_tensors_of(weight), _tensors_of(source)):
        if tensor is not None:
            tensor.copy_(value, non_blocking=non_blocking)
    if isinstance(weight, PackedWeight):
        weight.expanded = None
    return weight


PackedWeight.operations = {
    aten.detach.default: alias,
    aten.alias.default: alias,
    aten.clone.default: _clone,
    to_copy: _to,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy,
}

torch.serialization.add_safe_globals([_rebuilt])
