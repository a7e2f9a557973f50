"""Matrices whose blocks share a scale: their values, and rounding to the format again with scales that move little.

A grid is the values that codes and scales can stand for. A weight that was on its format's grid is so only under its own
scales, so a block gets a new scale only where that leaves a smaller error. An unchanged block then keeps its bits, and a
change is lost only where it is smaller than the grid's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

# a new scale may leave at most this part of a block's squared error, since scales should not move by a bit for nothing
MAX_ERROR_RATIO = 0.9
# steps beyond its block's largest code that a dithered value may lie before the block may take a new scale
MAX_OVERSHOOT = 0.5
POWER_BIAS = 127  # of the bytes that stand for powers of two


class Rounded(NamedTuple):
    """A matrix in a format: codes and scales as stored, and the values in fp32 that they stand for."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


class _Candidate(NamedTuple):
    """A matrix rounded under some scales.

    values: of its codes, before they are scaled. may_move: whether a block may take other scales; one truth value for all
    blocks, or one each. errors: computes the squared errors, of dithered values their mean over all dithers.
    """

    values: torch.Tensor
    may_move: torch.Tensor
    errors: Callable[[], torch.Tensor]


class Grid(NamedTuple):
    """A format of matrices: blocks of `rows` by `columns` values share a scale, the last blocks cut off.

    new_scales: computes the scales, as stored, from the blocks' largest magnitudes in fp32; None where scales are those
    of a whole weight, and stay. factors: converts stored scales to the numbers that codes are multiplied by, in the dtype
    in which values are scaled. codes, values: round scaled values to codes, and convert codes to values in fp32.
    neighbours: finds the values of the codes below and above scaled values in fp32. The two always differ: where a scaled
    value is a code's, one of them is it; beyond all codes they are the last two.
    """

    rows: int
    columns: int
    new_scales: Callable[[torch.Tensor], torch.Tensor] | None
    factors: Callable[[torch.Tensor], torch.Tensor]
    codes: Callable[[torch.Tensor], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]
    neighbours: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def dense(self, codes: torch.Tensor, scales: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Compute the values [rows, columns] in fp32 of codes and scales. first_row: where codes are some rows alone, the
        first of them; scales are always those of the whole matrix."""
        values = self.values(codes)
        return values.mul_(self.spread(scales, values.shape, first_row))

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a weight [rows, columns] in fp32 to codes and new scales."""
        assert self.new_scales is not None
        scales = self.new_scales(self.reduce_blocks(weight.abs(), torch.amax))
        return self.codes(scaled(weight, self.spread(scales, weight.shape))), scales

    def round(
        self,
        weight: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor | None = None,
        uniform: torch.Tensor | None = None,
    ) -> Rounded:
        """Round a weight [rows, columns] in fp32 to this format, where it had `scales` and `codes` before.

        Each block keeps its scale unless a new one leaves a clearly smaller error; where it is dithered, only a block
        with values beyond its largest code may take one, since the mean of all others is exact. In a block that keeps
        its scale, a value that is what its code stands for keeps the code; without `codes`, one that rounds to itself.

        uniform: numbers in [0, 1) like the weight (Dither.uniform), by which it is dithered: a value becomes its upper
            neighbour where its number is less than the fraction of the step at which it lies above the lower one. None:
            rounds to nearest, ties to even.
        """
        factors = self.spread(scales, weight.shape)
        old = self._candidate(weight, factors, uniform)
        values, is_same = old.values, None
        if codes is not None:
            before = self.values(codes)
            is_same = torch.mul(before, factors).float() == weight
            values = torch.where(is_same, before, values)
        new_scales = scales
        if self.new_scales is not None and bool(old.may_move.any()):
            new_scales = self.new_scales(self.reduce_blocks(weight.abs(), torch.amax))
        if not torch.equal(new_scales.view(torch.uint8), scales.view(torch.uint8)):
            new_factors = self.spread(new_scales, weight.shape)
            new, errors = self._candidate(weight, new_factors, uniform), old.errors()
            if is_same is not None:
                errors.masked_fill_(is_same, 0.0)
            old_error, new_error = (self.reduce_blocks(each, torch.sum) for each in (errors, new.errors()))
            is_better = (new_error < MAX_ERROR_RATIO * old_error) & old.may_move
            if bool(is_better.any()):
                # torch.where knows no 8-bit floats
                plain = torch.uint8 if scales.dtype.itemsize == 1 else scales.dtype
                scales = torch.where(is_better, new_scales.view(plain), scales.view(plain)).view(scales.dtype)
                is_better = self._repeat_blocks(is_better, weight.shape)
                values = torch.where(is_better, new.values, values)
                factors = torch.where(is_better, new_factors, factors)
        return Rounded(self.codes(values), scales, values.mul_(factors))

    def _candidate(self, weight: torch.Tensor, factors: torch.Tensor, uniform: torch.Tensor | None) -> _Candidate:
        """Round a weight to the values of codes under these factors."""
        if uniform is None:
            values = self.values(self.codes(scaled(weight, factors)))
            return _Candidate(
                values,
                torch.ones((), dtype=torch.bool, device=weight.device),
                lambda: (values * factors - weight).square_(),
            )
        factors = factors.float()
        exact = scaled(weight, factors)
        low, high = self.neighbours(exact)
        step = high.sub(low)
        fraction = exact.sub_(low).div_(step)  # of a step above `low`; below 0 or above 1 beyond all codes

        def errors() -> torch.Tensor:
            inside = fraction.clamp(0.0, 1.0)
            outside = fraction.sub(inside).square_()
            return inside.mul_(1.0 - inside).add_(outside).mul_(step.mul(factors).square_())

        least, largest = fraction.aminmax()
        may_move = torch.logical_or(least < -MAX_OVERSHOOT, largest > 1 + MAX_OVERSHOOT)
        if bool(may_move):
            may_move = self.reduce_blocks(fraction.sub(0.5).abs_(), torch.amax) > 0.5 + MAX_OVERSHOOT
        return _Candidate(torch.where(uniform < fraction, high, low), may_move, errors)

    def spread(self, scales: torch.Tensor, shape: torch.Size, first_row: int = 0) -> torch.Tensor:
        """Expand stored scales to a factor for each value."""
        return self._repeat_blocks(self.factors(scales), shape, first_row)

    def _repeat_blocks(self, by_block: torch.Tensor, shape: torch.Size, first_row: int = 0) -> torch.Tensor:
        """Repeat a number for each block [blocks, blocks] for each of the block's values."""
        by_row = by_block.unsqueeze(1).expand(-1, self.rows, -1).flatten(0, 1)[first_row : first_row + shape[0]]
        return by_row.unsqueeze(2).expand(-1, -1, self.columns).flatten(1)[:, : shape[1]]

    def reduce_blocks(self, matrix: torch.Tensor, reduce) -> torch.Tensor:
        """Reduce [rows, columns] to [blocks, blocks]; values are not negative, so that zeros pad them."""
        rows, columns = matrix.shape
        padded = F.pad(matrix, (0, -columns % self.columns, 0, -rows % self.rows))
        return reduce(padded.unflatten(1, (-1, self.columns)).unflatten(0, (-1, self.rows)), dim=(1, 3))


def scaled(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Divide a weight by its factors, in their dtype; where a factor is 0, by 1."""
    return weight.to(factors.dtype) / torch.where(factors == 0, 1.0, factors)


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Convert bytes, which are biased exponents, to powers of two in fp64."""
    return torch.exp2(scales.view(torch.uint8).double() - POWER_BIAS)


def ceiled_exponent(ideal: torch.Tensor) -> torch.Tensor:
    """Compute the exponent of the smallest power of two that is not less than `ideal`."""
    mantissa, exponent = torch.frexp(ideal)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)
