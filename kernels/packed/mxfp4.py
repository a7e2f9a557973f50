"""MXFP4 as gpt-oss and, under other names, DeepSeek-V4 have it: 32 E2M1 values of a row share a power of two."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..minifloat import e2m1_neighbours, from_e2m1, to_e2m1
from .format import Format, Quantized, Shapes
from .grid import POWER_BIAS, Grid, Rounded, powers_of_two

BLOCK = 32


def _new_scales(largest: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent; 6 = 0.75 * 2^3
    power = torch.where(mantissa <= 0.75, exponent - 3, exponent - 2).clamp(min=-POWER_BIAS)
    return torch.where(largest > 0, power + POWER_BIAS, 0).to(torch.uint8)


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    return to_e2m1(scaled).unflatten(-1, (-1, BLOCK // 2))


def _values(codes: torch.Tensor) -> torch.Tensor:
    return from_e2m1(codes.flatten(-2))


class MXFP4(Format):
    """OCP's MXFP4, under the names of gpt-oss's checkpoints.

    codes uint8 [E, N, K/32, 16], the first value in the LOW half; scales uint8 [E, N, K/32], each for 2^(scale - 127),
    the smallest with which no value exceeds the largest E2M1 value (as Transformers quantizes). Values are rounded to
    nearest, ties to even.
    """

    name, block, dims = "mxfp4", BLOCK, (4, 3, None)
    suffixes, loss = ("blocks", "scales"), 12
    values: ClassVar = {"scales": torch.float8_e8m0fnu}

    def grid(self) -> Grid:
        """Make the grid of one expert: codes [rows, columns / 32, 16], scales [rows, columns / 32]."""
        return Grid(1, BLOCK, _new_scales, powers_of_two, _codes, _values, e2m1_neighbours)

    def _stored_shapes(self, num_experts, size_out, size_in, parts, kinds, group):
        scales = num_experts, size_out, size_in // BLOCK
        return Shapes((*scales, BLOCK // 2), scales, None)

    def pack_expert(self, weight_NK: torch.Tensor, parts: int, kinds: int) -> tuple[torch.Tensor, ...]:
        """See Format."""
        return self.grid().quantize(weight_NK)

    def round_expert(self, packed: Quantized, expert: int, weight_NK: torch.Tensor, uniform=None) -> Rounded:
        """See Format."""
        return self.grid().round(weight_NK, packed.scales[expert], packed.codes[expert], uniform)

    def expert(self, packed: Quantized, expert: int) -> torch.Tensor:
        """See Format."""
        powers = torch.arange(256, dtype=torch.uint8, device=packed.codes.device)
        codes = torch.arange(16, dtype=torch.uint8, device=packed.codes.device)
        table = (
            (powers_of_two(powers).unsqueeze(1) * from_e2m1(codes)[::2]).float().view(-1)
        )  # by scale and code; exact
        row, bytes_ = packed.scales[expert].int().unsqueeze(-1) << 4, packed.codes[expert].int()
        return torch.stack((table[row | bytes_ & 15], table[row | bytes_ >> 4]), dim=-1).view(len(row), -1)
