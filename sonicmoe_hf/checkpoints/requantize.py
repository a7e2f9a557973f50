"""Weights that were changed, rounded to the format that the hub stored them in, with scales that move as little as they
can.

A weight on its format's grid stays on it only under its own scales: a block gets a new scale only where that leaves a
smaller error. So an unchanged block keeps its bits, and a change is lost only where it is under the grid's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..kernels.minifloat import E2M1_MAX, E4M3_MAX, from_e2m1, from_e4m3, to_e2m1, to_e4m3
from ..kernels.quantized import SCALE_COLUMNS

CLEARLY = 0.9  # of a block's squared error: what a new scale must save, or it would move by a bit for nothing
POWER_BIAS = 127  # of the bytes that stand for powers of two


class Grid(NamedTuple):
    """A format of matrices: blocks of `rows` by `columns` values share a scale, the last blocks cut off.

    fresh: the scales, as stored, from the blocks' largest magnitudes in fp32. factors: what scales multiply codes by, in
    the dtype in which values are scaled. codes, values: rounded codes of scaled values, and the values of codes.
    """

    rows: int
    columns: int
    fresh: Callable[[torch.Tensor], torch.Tensor]
    factors: Callable[[torch.Tensor], torch.Tensor]
    codes: Callable[[torch.Tensor], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]


class Rounded(NamedTuple):
    """A matrix in a format: codes and scales as stored, and the values in fp32 that they stand for."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def _from_powers(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.view(torch.uint8).double() - POWER_BIAS)


def _ceiled_power(ideal: torch.Tensor) -> torch.Tensor:
    """The exponent of the smallest power of two that is not less."""
    mantissa, exponent = torch.frexp(ideal)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def fp8_grid(block: tuple[int, int], dtype: torch.dtype, powers: bool) -> Grid:
    """E4M3 values as DeepSeek's: dtype, that of the scales; powers, whether those are powers of two in any dtype."""

    def fresh(largest: torch.Tensor) -> torch.Tensor:
        ideal = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
        if dtype.itemsize == 1:
            exponent = _ceiled_power(ideal).clamp(-POWER_BIAS, POWER_BIAS)
            return (exponent + POWER_BIAS).to(torch.uint8).view(dtype)
        if powers:
            return torch.exp2(_ceiled_power(ideal).float()).to(dtype)
        rounded_up = ideal if dtype == torch.float32 else ideal * (1 + torch.finfo(dtype).eps)
        return rounded_up.to(dtype)

    def factors(scales: torch.Tensor) -> torch.Tensor:
        return _from_powers(scales).float() if scales.dtype.itemsize == 1 else scales.float()

    def codes(scaled: torch.Tensor) -> torch.Tensor:
        return to_e4m3(scaled).view(torch.float8_e4m3fn)

    return Grid(*block, fresh, factors, codes, lambda codes: codes.float())


def mxfp4_grid() -> Grid:
    """gpt-oss's: codes [rows, columns / 32, 16], scales [rows, columns / 32]."""
    columns = SCALE_COLUMNS["mxfp4"]

    def fresh(largest: torch.Tensor) -> torch.Tensor:
        exponent = _ceiled_power(largest / E2M1_MAX).clamp(-POWER_BIAS, POWER_BIAS)
        return torch.where(largest > 0, exponent + POWER_BIAS, 0).to(torch.uint8)

    def codes(scaled: torch.Tensor) -> torch.Tensor:
        return to_e2m1(scaled).unflatten(-1, (-1, columns // 2))

    return Grid(1, columns, fresh, _from_powers, codes, lambda codes: from_e2m1(codes.flatten(-2)))


def nvfp4_grid(scale_2: torch.Tensor) -> Grid:
    """ModelOpt's, under the whole tensor's scale, which stays: engines that fuse projections want theirs to be equal."""

    def fresh(largest: torch.Tensor) -> torch.Tensor:
        return to_e4m3(largest / (E2M1_MAX * scale_2)).view(torch.float8_e4m3fn)

    def factors(scales: torch.Tensor) -> torch.Tensor:
        return (from_e4m3(scales.view(torch.uint8)) * scale_2).double()

    return Grid(1, SCALE_COLUMNS["nvfp4"], fresh, factors, to_e2m1, from_e2m1)


def requantize(weight: torch.Tensor, scales: torch.Tensor, grid: Grid) -> Rounded:
    """A weight [rows, columns] in fp32 in the format of `grid`, where it had `scales` before; each block keeps its scale
    unless a new one leaves a clearly smaller error."""
    largest = _of_blocks(weight.abs(), grid, torch.amax)
    fresh = grid.fresh(largest)
    kept = _rounded(weight, scales, grid)
    if torch.equal(fresh.view(torch.uint8), scales.view(torch.uint8)):
        return kept
    anew = _rounded(weight, fresh, grid)
    errors = [_of_blocks((of.values - weight).square(), grid, torch.sum) for of in (anew, kept)]
    better = errors[0] < CLEARLY * errors[1]
    if not bool(better.any()):
        return kept
    plain = torch.uint8 if scales.dtype.itemsize == 1 else scales.dtype  # torch.where knows no 8-bit floats
    chosen = torch.where(better, fresh.view(plain), scales.view(plain)).view(scales.dtype)
    return _rounded(weight, chosen, grid)


def dense(codes: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The values [rows, columns] in fp32 that stand for codes and scales."""
    values = grid.values(codes)
    return values.mul_(_spread(scales, grid, values.shape))


def _spread(scales: torch.Tensor, grid: Grid, shape: torch.Size) -> torch.Tensor:
    """What each value's code is multiplied by."""
    factors = grid.factors(scales).repeat_interleave(grid.rows, 0)[: shape[0]]
    return factors.repeat_interleave(grid.columns, 1)[:, : shape[1]]


def _rounded(weight: torch.Tensor, scales: torch.Tensor, grid: Grid) -> Rounded:
    factors = _spread(scales, grid, weight.shape)
    codes = grid.codes(weight.to(factors.dtype) / torch.where(factors > 0, factors, 1.0))
    return Rounded(codes, scales, grid.values(codes).mul_(factors))


def _of_blocks(matrix: torch.Tensor, grid: Grid, reduce) -> torch.Tensor:
    """[rows, columns] of values that are not negative -> [blocks, blocks]."""
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % grid.columns, 0, -rows % grid.rows))
    return reduce(padded.unflatten(1, (-1, grid.columns)).unflatten(0, (-1, grid.rows)), dim=(1, 3))
