"""Matrices whose blocks share a scale: their values, and rounding to the format again with scales that move little.

A weight on its format's grid stays on it only under its own scales: a block gets a new scale only where that leaves a
smaller error. So an unchanged block keeps its bits, and a change is lost only where it is under the grid's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

CLEARLY = 0.9  # of a block's squared error: what a new scale must save, or it would move by a bit for nothing
POWER_BIAS = 127  # of the bytes that stand for powers of two


class Rounded(NamedTuple):
    """A matrix in a format: codes and scales as stored, and the values in fp32 that they stand for."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


class Grid(NamedTuple):
    """A format of matrices: blocks of `rows` by `columns` values share a scale, the last blocks cut off.

    fresh: the scales, as stored, from the blocks' largest magnitudes in fp32. factors: what scales multiply codes by, in
    the dtype in which values are scaled. codes, values: rounded codes of scaled values, and the values of codes in fp32.
    """

    rows: int
    columns: int
    fresh: Callable[[torch.Tensor], torch.Tensor]
    factors: Callable[[torch.Tensor], torch.Tensor]
    codes: Callable[[torch.Tensor], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]

    def dense(self, codes: torch.Tensor, scales: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Return the values [rows, columns] in fp32 for which codes and scales stand; of some rows alone, from
        `first_row` on, by the scales of the whole matrix."""
        values = self.values(codes)
        return values.mul_(self.spread(scales, values.shape, first_row))

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the scales of a weight [rows, columns] in fp32."""
        scales = self.fresh(self.of_blocks(weight.abs(), torch.amax))
        return self._codes(weight, self.spread(scales, weight.shape)), scales

    def round(self, weight: torch.Tensor, scales: torch.Tensor) -> Rounded:
        """Round a weight [rows, columns] in fp32 to this format, where it had `scales` before; each block keeps its scale
        unless a new one leaves a clearly smaller error."""
        fresh = self.fresh(self.of_blocks(weight.abs(), torch.amax))
        kept = self._rounded(weight, scales)
        if torch.equal(fresh.view(torch.uint8), scales.view(torch.uint8)):
            return kept
        anew = self._rounded(weight, fresh)
        errors = [self.of_blocks((of.values - weight).square(), torch.sum) for of in (anew, kept)]
        better = errors[0] < CLEARLY * errors[1]
        if not bool(better.any()):
            return kept
        plain = torch.uint8 if scales.dtype.itemsize == 1 else scales.dtype  # torch.where knows no 8-bit floats
        chosen = torch.where(better, fresh.view(plain), scales.view(plain)).view(scales.dtype)
        return self._rounded(weight, chosen)

    def _rounded(self, weight: torch.Tensor, scales: torch.Tensor) -> Rounded:
        factors = self.spread(scales, weight.shape)
        codes = self._codes(weight, factors)
        return Rounded(codes, scales, self.values(codes).mul_(factors))

    def _codes(self, weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return self.codes(weight.to(factors.dtype) / torch.where(factors != 0, factors, 1.0))

    def spread(self, scales: torch.Tensor, shape: torch.Size, first_row: int = 0) -> torch.Tensor:
        """Return what each value's code is multiplied by."""
        by_block = self.factors(scales)
        by_row = by_block.unsqueeze(1).expand(-1, self.rows, -1).flatten(0, 1)[first_row : first_row + shape[0]]
        return by_row.unsqueeze(2).expand(-1, -1, self.columns).flatten(1)[:, : shape[1]]

    def of_blocks(self, matrix: torch.Tensor, reduce) -> torch.Tensor:
        """Reduce [rows, columns] of values that are not negative to [blocks, blocks]."""
        rows, columns = matrix.shape
        padded = F.pad(matrix, (0, -columns % self.columns, 0, -rows % self.rows))
        return reduce(padded.unflatten(1, (-1, self.columns)).unflatten(0, (-1, self.rows)), dim=(1, 3))


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Return the powers of two in fp64 for which bytes stand, as their exponents."""
    return torch.exp2(scales.view(torch.uint8).double() - POWER_BIAS)


def ceiled_exponent(ideal: torch.Tensor) -> torch.Tensor:
    """Return the exponent of the smallest power of two that is not less."""
    mantissa, exponent = torch.frexp(ideal)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)
