"""The output of a conversion: the tensors of a new checkpoint, which are made as its files are written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ...errors import CheckpointError
from ..reading.stored import StoredWeights
from ..reading.weight import UntiedWeight, Weight
from .rounding_effects import Roundings


def finite_bounds(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Say whether all values are finite in `dtype`, without a temporary of their size: rounding keeps the order."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor)).to(dtype)).all())


def cast_in_range(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Cast `tensor` to `dtype`, where its finite values stay finite.

    Raises:
        CheckpointError: some do not.
    """
    if tensor.dtype == dtype:  # also of integers
        return tensor
    if torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max or finite_bounds(tensor, dtype):
        return tensor.to(dtype)
    finite = tensor[tensor.isfinite()]
    if finite.numel() and not finite_bounds(finite, dtype):
        raise CheckpointError(
            f"{name} has values up to {finite.abs().max().item():.3g}, which are infinite in {dtype}; cast to bfloat16 "
            "or float32"
        )
    return tensor.to(dtype)


class OutputTensors(NamedTuple):
    """Tensors of the output that are made together, such as the codes and scales of a weight.

    shells: tensors like them on the meta device, by name. fill: writes their values into memory that it is given, in the
    order of `shells`.
    """

    shells: dict[str, torch.Tensor]
    fill: Callable[[list[torch.Tensor]], object]

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return sum(shell.nbytes for shell in self.shells.values())


def shell(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Output:
    """The weights of a checkpoint under their own names, as they are stored or dense.

    Args:
        stored: the checkpoint. dtype: to cast dense weights to; None keeps what is stored. keeps_format: whether
            quantized weights stay quantized, those with an adapter rounded anew, or become dense.
    Attributes:
        roundings: what rounding to a format did, once tensors are made.
    """

    def __init__(self, stored: StoredWeights, dtype: torch.dtype | None = None, keeps_format: bool = False):
        self.stored, self.dtype, self.keeps_format = stored, dtype, keeps_format
        self.roundings = Roundings(str(stored.quantization))

    def tensors(self) -> list[OutputTensors]:
        """List all tensors, in the order of the checkpoint's files.

        Raises:
            CheckpointError: weights do not fit; its `fill`s raise it where values do not.
        """
        return [made for weight in self.stored.weights.values() for made in self.tensors_of(weight)]

    def tensors_of(self, weight: Weight) -> list[OutputTensors]:
        """List the tensors of one weight under its own name; dense, none of what is for inference in the format alone."""
        if not self.keeps_format:
            return [] if self.stored.is_unused(weight.name) else [self._dense(weight)]
        if weight.format is None and (weight.change or isinstance(weight, UntiedWeight)):
            return [self._dense(weight)]
        headers = {tensor: self.stored.tensors[tensor] for tensor in weight.tensor_names}
        shells = {tensor: shell(header.shape, header.dtype) for tensor, header in headers.items()}
        return [OutputTensors(shells, partial(self._round if weight.change else _copy, weight))]

    def written_name(self, weight: Weight) -> str:
        """Name a weight as it is written, if it is not part of others."""
        return weight.name

    def wanted_dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Choose the dtype that a weight of the dtype `stored` is written in."""
        keeps_fp32 = self.stored.keep_fp32.intersection(name.split("."))
        return self.dtype if self.dtype is not None and stored.is_floating_point and not keeps_fp32 else stored

    def _dense(self, weight: Weight) -> OutputTensors:
        name = self.written_name(weight)
        dtype = self.wanted_dtype(name, weight.dtype)

        def fill(outs: list[torch.Tensor]) -> None:
            for expert, (out,) in weight.by_expert(outs):
                values = weight.read_changed(expert)
                out.copy_((values if weight.change else cast_in_range(values, dtype, name)).view(out.shape))

        return OutputTensors({name: shell(weight.shape, dtype)}, fill)

    def _round(self, weight: Weight, outs: list[torch.Tensor]) -> None:
        """Write a changed weight in the format that it has, one expert after the other."""
        for out, tensor in zip(outs[2:], weight.raw()[2:]):
            out.copy_(tensor)
        for expert, own in weight.by_expert(outs):
            before, exact, rounded = weight.round_change(expert)
            self.roundings.add(weight.name, before, exact, rounded.values, expert, weight.is_dithered)
            for out, made in zip(own, weight.rewrite(rounded)):
                out.copy_(made.view(out.dtype).view(out.shape))


def _copy(weight: Weight, outs: list[torch.Tensor]) -> None:
    for out, tensor in zip(outs, weight.raw()):
        out.copy_(tensor)
