"""Tensors that a new checkpoint will hold, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from ..errors import CheckpointError

TARGETS = ("native", "hub")


def finite_bounds(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is finite in `dtype`, without a temporary of the tensor's size: rounding keeps the order."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor)).to(dtype)).all())


def in_range(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """`tensor` in `dtype`, where its finite values stay finite.

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


class Planned(NamedTuple):
    """A tensor to be written: its name, one on the meta device like it, and what fills the memory it is written from."""

    name: str
    like: torch.Tensor
    fill: Callable[[torch.Tensor], object]


def shell(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def made_together(shells: dict[str, torch.Tensor], fill: Callable[[list[torch.Tensor]], None]) -> Iterator[Planned]:
    """Tensors that stand for one weight, like `shells` on the meta device, which `fill` fills: they are asked for one
    after the other."""
    made: dict[str, torch.Tensor] = {}

    def one(name: str, out: torch.Tensor) -> None:
        if name not in made:
            made.update((name, torch.empty_like(shell, device="cpu")) for name, shell in shells.items())
            fill(list(made.values()))
        out.copy_(made.pop(name))

    for name, shell in shells.items():
        yield Planned(name, shell, partial(one, name))
