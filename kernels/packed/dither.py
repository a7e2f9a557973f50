"""Dithered rounding: a value goes up where a number in [0, 1) is less than the fraction of the grid's step by which the
value exceeds its lower neighbour.

The mean over the numbers is the value itself, so a change far below the grid's steps survives, as noise around it. The
numbers are a hash of a value's row, column, expert and weight, and of a seed: the same on any machine, in any order of
files, ranks and rows.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from .format import ORDERS

BITS = 0xFFFFFFFF
FACTORS = 0x2C1B3C6D, 0x297A2D39  # odd, and under 2^31: int64 holds their products with 32 bits
AT_ONCE = 2**18  # values that are hashed together, in the CPU's cache


class Dither(NamedTuple):
    """The numbers that a weight's values are compared with.

    name: the weight's; gate and up of an expert are one weight. seed: any integer. order: of ORDERS, in which the rows of
    a matrix stand. first_row: of the matrix, in a weight that holds all gates and then all ups; of "whole" ones alone.

    The number of an expert's row r and column c is the upper 24 of 32 bits (all arithmetic on unsigned 32 bits; r of the
    weight whose rows are concatenated):

        mix(x) = x3, where x1 = (x ^ x >> 15) * FACTORS[0], x2 = (x1 ^ x1 >> 12) * FACTORS[1], x3 = x2 ^ x2 >> 15
        row = mix(r ^ mix(expert ^ key)), column = mix(c ^ ~key)
        y1 = (row ^ column) * FACTORS[0], y2 = (y1 ^ y1 >> 15) * FACTORS[1]
    """

    name: str
    seed: int = 0
    order: str = "whole"
    first_row: int = 0

    @property
    def key(self) -> int:
        """Hash name and seed to 32 bits."""
        return int.from_bytes(hashlib.sha256(f"{self.seed} {self.name}".encode()).digest()[:4], "little")

    def uniform(self, expert: int, shape: torch.Size, device: torch.device | str = "cpu") -> torch.Tensor:
        """Compute the numbers of an expert's matrix [N, K], fp32. expert: its number among all of the layer."""
        num_rows, num_columns = shape
        _, kinds = ORDERS[self.order]
        rows = torch.arange(num_rows, dtype=torch.int64, device=device).view(kinds, -1).T.reshape(-1)
        columns = torch.arange(num_columns, dtype=torch.int64, device=device)
        expert_hash = _mix(torch.tensor(expert ^ self.key, dtype=torch.int64, device=device))
        rows, columns = _mix((rows + self.first_row) ^ expert_hash), _mix(columns ^ (~self.key & BITS))
        numbers = torch.empty(num_rows, num_columns, dtype=torch.float32, device=device)
        size = max(1, AT_ONCE // max(1, num_columns))
        for block, out in zip(rows.split(size), numbers.split(size)):
            hashed = (block.unsqueeze(1) ^ columns).mul_(FACTORS[0]).bitwise_and_(BITS)
            hashed.bitwise_xor_(hashed >> 15).mul_(FACTORS[1]).bitwise_and_(BITS)
            torch.mul(hashed.bitwise_right_shift_(8), 2.0**-24, out=out)
        return numbers


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits, held in int64: each depends on all."""
    bits = (bits ^ bits >> 15) * FACTORS[0] & BITS
    bits = (bits ^ bits >> 12) * FACTORS[1] & BITS
    return bits ^ bits >> 15
