"""What a checkpoint will hold under the names of another's files: tensors that nothing changes are copied bit for bit,
changed weights keep their dtype, or are rounded to the format that the hub stored them in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch

from ..errors import CheckpointError
from ..formats.format import has_nan_e4m3, has_nan_power
from ..formats.grid import Grid
from .layouts import Named
from .packed import TRANSPOSED, part_views
from .plan import Planned, is_finite
from .roundings import Roundings
from .source import Source
from .stored import StoredWeights


class Changes(Protocol):
    """Other values of weights than are stored."""

    def __contains__(self, weight: str) -> bool:
        """Whether the weight has other values."""

    def exact(self, weight: str, expert: int | None = None) -> torch.Tensor:
        """All of the weight in fp32, or one expert's [1, ...] of it."""


def plan_kept(stored: StoredWeights, changes: Changes | None, roundings: Roundings) -> list[Planned]:
    """The tensors of a checkpoint in the layout and the format of `stored`, in the order of its files.

    Raises:
        CheckpointError: `stored` is not quantized, or by this package, for training.
    """
    if stored.quantization is None:
        raise CheckpointError(
            f"{stored.folder} is not quantized, so there is no format to keep; leave quantize out, or give mxfp4 "
            "(gpt-oss) or fp8"
        )
    if stored.packed_here:
        raise CheckpointError(
            f"{stored.folder} was packed for training, in names that no engine reads; leave quantize out, and convert "
            "the result: sonicmoe-hf convert SRC DST --layout hub --quantize FORMAT"
        )
    planned: list[Planned] = []
    for weight, names in stored.weights.items():
        if changes is None or weight not in changes:
            planned += [_copied(stored, name) for name in names]
        elif stored.is_quantized(weight):
            planned += _rounded(stored, changes, weight, roundings)
        else:
            planned.append(_dense(stored, changes, weight))
    return planned


def plan_dense(stored: StoredWeights, changes: Changes) -> list[Planned]:
    """The tensors of a checkpoint in the layout of `stored`, dequantized where they are quantized."""
    planned: list[Planned] = []
    for weight in stored.weights:
        if weight in changes:
            planned.append(_dense(stored, changes, weight))
        elif stored.is_quantized(weight):
            planned.append(Planned(weight, *_form(stored, weight), partial(stored.read, weight)))
        elif stored.hub_format is None or not weight.endswith(stored.hub_format.unused):
            planned.append(_copied(stored, weight))
    return planned


def _form(stored: StoredWeights, weight: str) -> tuple[tuple[int, ...], torch.dtype]:
    return stored.shape_of(weight), stored.dtype_of(weight)


def _copied(stored: StoredWeights, name: str) -> Planned:
    header = stored.tensors[name]
    return Planned(name, header.shape, header.dtype, partial(stored.stored, name), is_sound)


def is_sound(stored: torch.Tensor) -> bool:
    """Whether what is stored has no NaN or infinity; bytes show none."""
    if stored.dtype == torch.float8_e4m3fn:
        return not has_nan_e4m3(stored)
    if stored.dtype == torch.float8_e8m0fnu:
        return not has_nan_power(stored)
    return is_finite(stored) if stored.is_floating_point() else True


def _dense(stored: StoredWeights, changes: Changes, weight: str) -> Planned:
    """A changed weight, rounded once; of one that holds all experts, one after the other."""
    shape, dtype = _form(stored, weight)

    def make() -> torch.Tensor:
        if len(shape) != 3:
            return changes.exact(weight).to(dtype)
        made = torch.empty(shape, dtype=dtype)
        for expert in range(shape[0]):
            made[expert] = changes.exact(weight, expert)[0]
        return made

    return Planned(weight, shape, dtype, make)


def _rounded(stored: StoredWeights, changes: Changes, weight: str, roundings: Roundings) -> Iterator[Planned]:
    """What stands for a changed weight; the tensors are asked for one after the other, and made together."""
    made: dict[str, torch.Tensor] = {}

    def make(name: str) -> torch.Tensor:
        if name not in made:
            made.update(_round(stored, changes, weight, roundings))
        return made.pop(name)

    for name in stored.weights[weight]:
        header = stored.tensors[name]
        yield Planned(name, header.shape, header.dtype, partial(make, name), is_sound)


def _round(stored: StoredWeights, changes: Changes, weight: str, roundings: Roundings) -> dict[str, torch.Tensor]:
    roundings.begin(weight)
    tensors = {name: stored.stored(name) for name in stored.weights[weight]}
    grid = stored.grid(weight)
    codes, scales = list(tensors.values())[:2]
    if stored.is_packed(weight):  # of all experts
        for expert in range(codes.shape[0]):
            exact = changes.exact(weight, expert)[0]
            exact = exact.T if stored.is_transposed else exact
            _round_matrix(weight, codes[expert], scales[expert], exact, grid, roundings)
    else:
        _round_matrix(weight, codes, scales, changes.exact(weight), grid, roundings)
    return tensors


def _round_matrix(
    weight: str, codes: torch.Tensor, scales: torch.Tensor, exact: torch.Tensor, grid: Grid, roundings: Roundings
) -> None:
    before = grid.dense(codes, scales)
    rounded = grid.round(exact, scales)
    codes.copy_(rounded.codes)
    scales.copy_(rounded.scales)
    roundings.add(weight, before, exact, rounded.values)


def exact_values(stored: StoredWeights, weight: str, expert: int | None = None) -> torch.Tensor:
    """What a weight stands for in fp32, not rounded to bf16; or one expert's [1, ...] of one that holds all."""
    if not stored.is_quantized(weight):
        return (stored.read(weight) if expert is None else stored.raw(weight, expert)).float()
    codes, scales = (stored.raw(name, expert) for name in stored.weights[weight][:2])
    grid = stored.grid(weight)
    if expert is None and not stored.is_packed(weight):
        return grid.dense(codes, scales)
    values = torch.stack([grid.dense(own, scale) for own, scale in zip(codes, scales)])
    return values.transpose(1, 2) if stored.is_transposed else values


def expert_matrices(
    source: Source, block: str, named: Named, expert: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert of the weight `named` of `layout`, [out, in] in fp32, as it is packed: without and with what `source`
    changes."""
    shape = named.shape if named.expert is not None else named.shape[1:]
    if named.expert is None and layout in TRANSPOSED:
        shape = shape[::-1]
    before, exact = torch.empty(shape), torch.empty(shape)
    for part, view in named.stored.parts.items():
        rows = view if named.expert is not None else part_views(layout, part, "mxfp4")[0]
        rows(before).copy_(Source.part(source, block, part, expert))
        rows(exact).copy_(source.part(block, part, expert))
    return before, exact
