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
OUTGROWN = 0.5  # of a step: what a dithered value may lie beyond its block's largest code, rounding's largest error
POWER_BIAS = 127  # of the bytes that stand for powers of two


class Rounded(NamedTuple):
    """A matrix in a format: codes and scales as stored, and the values in fp32 that they stand for."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


class _Candidate(NamedTuple):
    """A matrix rounded under some scales: what codes stand for, and which blocks may take other scales.

    errors: gives the squared errors; of dithered values in the mean over all numbers.
    """

    values: torch.Tensor
    may_move: torch.Tensor
    errors: Callable[[], torch.Tensor]


class Grid(NamedTuple):
    """A format of matrices: blocks of `rows` by `columns` values share a scale, the last blocks cut off.

    fresh: the scales, as stored, from the blocks' largest magnitudes in fp32; None where scales are those of a whole
    weight, and stay. factors: what scales multiply codes by, in the dtype in which values are scaled. codes, values:
    rounded codes of scaled values, and the values of codes in fp32. neighbours: of scaled values in fp32 those of codes
    below and above, which differ: of a code's value either is it, and of those beyond all codes both are the last two.
    """

    rows: int
    columns: int
    fresh: Callable[[torch.Tensor], torch.Tensor] | None
    factors: Callable[[torch.Tensor], torch.Tensor]
    codes: Callable[[torch.Tensor], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]
    neighbours: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def dense(self, codes: torch.Tensor, scales: torch.Tensor, first_row: int = 0) -> torch.Tensor:
        """Return the values [rows, columns] in fp32 for which codes and scales stand; of some rows alone, from
        `first_row` on, by the scales of the whole matrix."""
        values = self.values(codes)
        return values.mul_(self.spread(scales, values.shape, first_row))

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the scales of a weight [rows, columns] in fp32."""
        assert self.fresh is not None
        scales = self.fresh(self.of_blocks(weight.abs(), torch.amax))
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
            neighbour where its number is less than its place between the two. None: rounds to nearest, ties to even.
        """
        factors = self.spread(scales, weight.shape)
        kept = self._candidate(weight, factors, uniform)
        values, is_same = kept.values, None
        if codes is not None:
            before = self.values(codes)
            is_same = torch.mul(before, factors).float() == weight
            values = torch.where(is_same, before, values)
        fresh = scales
        if self.fresh is not None and bool(kept.may_move.any()):
            fresh = self.fresh(self.of_blocks(weight.abs(), torch.amax))
        if not torch.equal(fresh.view(torch.uint8), scales.view(torch.uint8)):
            new_factors = self.spread(fresh, weight.shape)
            anew, errors = self._candidate(weight, new_factors, uniform), kept.errors()
            if is_same is not None:
                errors.masked_fill_(is_same, 0.0)
            of_kept, of_anew = (self.of_blocks(each, torch.sum) for each in (errors, anew.errors()))
            is_better = (of_anew < CLEARLY * of_kept) & kept.may_move
            if bool(is_better.any()):
                # torch.where knows no 8-bit floats
                plain = torch.uint8 if scales.dtype.itemsize == 1 else scales.dtype
                scales = torch.where(is_better, fresh.view(plain), scales.view(plain)).view(scales.dtype)
                is_better = self._by_value(is_better, weight.shape)
                values = torch.where(is_better, anew.values, values)
                factors = torch.where(is_better, new_factors, factors)
        return Rounded(self.codes(values), scales, values.mul_(factors))

    def _candidate(self, weight: torch.Tensor, factors: torch.Tensor, uniform: torch.Tensor | None) -> _Candidate:
        """Round to what codes under these factors stand for."""
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
        place = exact.sub_(low).div_(step)  # beyond the largest values it is theirs

        def errors() -> torch.Tensor:
            inside = place.clamp(0.0, 1.0)
            outside = place.sub(inside).square_()
            return inside.mul_(1.0 - inside).add_(outside).mul_(step.mul(factors).square_())

        least, largest = place.aminmax()
        may_move = torch.logical_or(least < -OUTGROWN, largest > 1 + OUTGROWN)
        if bool(may_move):
            may_move = self.of_blocks(place.sub(0.5).abs_(), torch.amax) > 0.5 + OUTGROWN
        return _Candidate(torch.where(uniform < place, high, low), may_move, errors)

    def spread(self, scales: torch.Tensor, shape: torch.Size, first_row: int = 0) -> torch.Tensor:
        """Expand the scales to the factor of each value, by which its code is multiplied."""
        return self._by_value(self.factors(scales), shape, first_row)

    def _by_value(self, by_block: torch.Tensor, shape: torch.Size, first_row: int = 0) -> torch.Tensor:
        """Repeat what each block has [blocks, blocks] for each of its values."""
        by_row = by_block.unsqueeze(1).expand(-1, self.rows, -1).flatten(0, 1)[first_row : first_row + shape[0]]
        return by_row.unsqueeze(2).expand(-1, -1, self.columns).flatten(1)[:, : shape[1]]

    def of_blocks(self, matrix: torch.Tensor, reduce) -> torch.Tensor:
        """Reduce [rows, columns] of values that are not negative to [blocks, blocks]."""
        rows, columns = matrix.shape
        padded = F.pad(matrix, (0, -columns % self.columns, 0, -rows % self.rows))
        return reduce(padded.unflatten(1, (-1, self.columns)).unflatten(0, (-1, self.rows)), dim=(1, 3))


def scaled(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Divide a weight by its factors, in their dtype, for the values that codes stand for; where a factor is 0, by 1."""
    return weight.to(factors.dtype) / torch.where(factors == 0, 1.0, factors)


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Return the powers of two in fp64 for which bytes stand, as their exponents."""
    return torch.exp2(scales.view(torch.uint8).double() - POWER_BIAS)


def ceiled_exponent(ideal: torch.Tensor) -> torch.Tensor:
    """Return the exponent of the smallest power of two that is not less."""
    mantissa, exponent = torch.frexp(ideal)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)
