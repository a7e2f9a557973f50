"""Packed experts in checkpoints: the tensors that stand for a weight, and how conversion makes and reads them.

A packed weight stands as [E, out, ...] in every layout, also where dense weights are stored transposed. No block crosses
from gate to up: moving those (interleaved or not) moves whole blocks, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..formats import PACKED, Format
from ..kernels.quantized import Quantized, dequantize_expert, quantize, stored_dtypes, stored_shapes
from .layouts import Named, View, holder

TRANSPOSED = ("gpt_oss",)  # layouts whose dense weights are [E, in, out]
FIRST = tuple(
    f"_{format.parts[0]}" for format in PACKED.values()
)  # how the name of a packed weight's first tensor ends


class Part(NamedTuple):
    """One of the tensors that stand for a weight, and the dtypes that it may have, the first where it is made here."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def parts_of(name: str, shape: tuple[int, ...], format: Format, layout: str) -> list[Part]:
    """The tensors that stand for the weight `name`, whose dense shape in the layout is `shape`.

    Raises:
        CheckpointError: its rows are no multiple of the format's block.
    """
    shape = (shape[0], *shape[:0:-1]) if layout in TRANSPOSED else shape
    try:
        shapes = stored_shapes(format.name, shape, order_of(layout, name))
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error
    fields = zip(format.names(name), Quantized._fields, shapes)
    return [
        Part(stored, part, stored_dtypes(format.name, field)) for stored, field, part in fields if part is not None
    ]


def order_of(layout: str, name: str) -> str:
    """The order of ORDERS in which the rows of the weight `name` stand."""
    if name.endswith(("down_proj", "c_proj")):
        return "whole"
    return "concatenated" if layout == "fused" else "interleaved"


def part_views(layout: str, part: str, format: str) -> tuple[View, View, View]:
    """Where in one expert's codes, scales and state those of `part` lie."""
    rows = holder("native" if layout in TRANSPOSED else layout, part).parts[part]
    place = 1 if part == "up" else 0

    def blocks(scales: torch.Tensor) -> torch.Tensor:
        return scales[min(place, scales.shape[0] - 1), :, min(place, scales.shape[2] - 1)]

    def half(state: torch.Tensor) -> torch.Tensor:
        return state.view(-1)[min(place, state.numel() - 1) :][:1]

    return rows, blocks if format == "fp8" else rows, half


def dense_expert(packed: Quantized, format: str, dtype: torch.dtype, expert: int, is_transposed: bool) -> torch.Tensor:
    """One expert of a packed weight [E, out, in]; [in, out] where dense ones are transposed."""
    weight = dequantize_expert(packed, format, dtype, expert)
    return weight.T if is_transposed else weight


def checked(packed: Quantized, format: Format, name: str) -> Quantized:
    """`packed`, if its parts fit together and its scales are finite.

    Raises:
        CheckpointError: they do not.
    """
    try:
        format.check(name, packed)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return packed


class Quantizer:
    """Packs the experts' weights of a converted checkpoint, one after the other.

    format: a name of FORMATS. The last weight is kept, since its tensors are asked for one by one.
    """

    def __init__(self, format: str):
        self.format = format
        self._last: tuple[str, Quantized] | None = None
        self._squares = [0.0, 0.0]

    def parts(self, named: Named, make: Callable[[], torch.Tensor]) -> Iterator[tuple[Part, Callable]]:
        """The tensors that stand for `named`, whose dense weight [E, out, in] `make` gives, and what makes each."""
        for place, part in enumerate(parts_of(named.name, named.shape, PACKED[self.format], "native")):
            yield part, lambda place=place: self._packed(named.name, make)[place]

    def _packed(self, name: str, make: Callable[[], torch.Tensor]) -> Quantized:
        if self._last is None or self._last[0] != name:
            self._last = None
            weight = make()
            try:
                packed = quantize(weight, self.format, order_of("native", name))
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}; nothing is written") from error
            first = weight[0].float()
            lost = dequantize_expert(packed, self.format, torch.float32, 0) - first
            self._squares[0] += lost.square().sum().item()
            self._squares[1] += first.square().sum().item()
            self._last = name, packed
        return self._last[1]

    def notice(self) -> str:
        """What was lost, measured on the first expert of every weight."""
        lost, whole = self._squares
        error = (lost / whole) ** 0.5 if whole else 0.0
        return (
            f"the experts are {self.format} now, and differ from the weights before by {error:.1%} (root mean square, "
            "over the first expert of each weight)"
        )
