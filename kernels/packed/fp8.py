"""FP8 as DeepSeek-V3's and Qwen's checkpoints have it: E4M3 values, and a scale for each block of rows and columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from ..minifloat import E4M3_MAX, e4m3_neighbours, from_e4m3, to_e4m3
from .format import Format, Quantized, Shapes, views_of_parts
from .grid import POWER_BIAS, Grid, Rounded, ceiled_exponent, powers_of_two

FP8_BLOCK = 128  # rows, and columns, that share a scale


def inverse_scales(largest: torch.Tensor) -> torch.Tensor:
    """Compute the inverse of the scales from the blocks' largest magnitudes in fp32, as Transformers' Fp8Quantize does,
    which multiplies values by it. A scale, its reciprocal, differs from largest / 448 by a bit in one block of three."""
    return torch.where(largest > 0, E4M3_MAX / largest, 1.0).clamp(max=torch.finfo(torch.float32).max)


def fp8_grid(dtype: torch.dtype, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK), has_powers: bool = False) -> Grid:
    """Make the grid of a matrix whose scales are of this dtype: fp32, bf16, or a byte for 2^(scale - 127).
    has_powers: whether scales are powers of two in any dtype."""

    def new_scales(largest: torch.Tensor) -> torch.Tensor:
        if dtype == torch.float32 and not has_powers:
            return 1.0 / inverse_scales(largest)
        ideal = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
        if dtype.itemsize == 1:
            exponent = ceiled_exponent(ideal).clamp(-POWER_BIAS, POWER_BIAS)
            return (exponent + POWER_BIAS).to(torch.uint8).view(dtype)
        if has_powers:
            return torch.exp2(ceiled_exponent(ideal).float()).to(dtype)
        return (ideal * (1 + torch.finfo(dtype).eps)).to(dtype)  # rounded up

    def codes(scaled: torch.Tensor) -> torch.Tensor:
        return to_e4m3(scaled).view(torch.float8_e4m3fn)

    def values(codes: torch.Tensor) -> torch.Tensor:
        return from_e4m3(codes.view(torch.uint8))

    return Grid(*block, new_scales, scales_in_fp32, codes, values, e4m3_neighbours)


def scales_in_fp32(scales: torch.Tensor) -> torch.Tensor:
    """Convert stored scales to fp32: bytes stand for powers of two, 2^(scale - 127)."""
    return powers_of_two(scales).float() if scales.dtype.itemsize == 1 else scales.float()


class FP8(Format):
    """DeepSeek-V3's FP8 (arXiv 2412.19437, section 3.3) in blocks of 128 x 128, the gates' and the ups' apart; the last
    blocks are cut off.

    codes uint8 [E, N, K], the bytes of E4M3 values; scales [E, P, ceil(N / P Q / 128), Q, ceil(K/128)], fp32, or uint8
    that stand for 2^(scale - 127). Row r of a kind q in part p, row (p N/P + r Q + q) of the weight, has the scales
    [p, r // 128, q]. A value is e4m3 * scale, in fp32. Those made here are fp32, as Transformers' Fp8Quantize makes them.
    """

    name, block, dims = "fp8", 16, (3, 5, None)
    suffixes, loss, element_size = ("values", "scale_inv"), 3, 1.1
    values: ClassVar = {"values": torch.float8_e4m3fn, "scale_inv": torch.float8_e8m0fnu}

    def shape(self, packed: Quantized) -> tuple[int, int, int]:
        """See Format."""
        num_experts, size_out, size_in = packed.codes.shape
        return num_experts, size_out, size_in

    def parts_and_kinds(self, packed: Quantized) -> tuple[int, int]:
        """See Format."""
        return packed.scales.shape[1], packed.scales.shape[3]

    def group(self, packed: Quantized) -> int:
        """See Format."""
        return FP8_BLOCK

    def _stored_shapes(self, num_experts, size_out, size_in, parts, kinds, group):
        rows, columns = (-(-size // FP8_BLOCK) for size in (size_out // (parts * kinds), size_in))
        return Shapes((num_experts, size_out, size_in), (num_experts, parts, rows, kinds, columns), None)

    def dtypes(self, field: str) -> tuple[torch.dtype, ...]:
        """See Format."""
        return (torch.float32, torch.uint8) if field == "scales" else super().dtypes(field)

    def pack_expert(self, weight_NK: torch.Tensor, parts: int, kinds: int) -> tuple[torch.Tensor, ...]:
        """See Format. Bit by bit Transformers': values times `inverse_scales`."""
        codes, scales = torch.empty_like(weight_NK, dtype=torch.uint8), []
        grid = fp8_grid(torch.float32)
        matrices = views_of_parts(weight_NK, parts, kinds)
        for matrix, own_codes in zip(matrices, views_of_parts(codes, parts, kinds)):
            largest = grid.reduce_blocks(matrix.abs(), torch.amax)
            inverse = inverse_scales(largest)
            own_codes.copy_(to_e4m3(matrix * grid.spread(inverse, matrix.shape)))
            scales.append(1.0 / inverse)
        return codes, torch.stack(scales).unflatten(0, (parts, kinds)).transpose(1, 2)

    def expert(self, packed: Quantized, expert: int) -> torch.Tensor:
        """See Format."""
        grid, (parts, kinds) = fp8_grid(packed.scales.dtype), self.parts_and_kinds(packed)
        values = torch.empty_like(packed.codes[expert], dtype=torch.float32)
        by_part = zip(*(views_of_parts(tensor, parts, kinds) for tensor in (values, packed.codes[expert])))
        for (own_values, codes), own_scales in zip(by_part, _scales(packed.scales[expert])):
            own_values.copy_(grid.dense(codes, own_scales))
        return values

    def round_expert(self, packed: Quantized, expert: int, weight_NK: torch.Tensor, uniform=None) -> Rounded:
        """See Format. Scales that stand for powers of two stay powers of two."""
        dtype, (parts, kinds) = packed.scales.dtype, self.parts_and_kinds(packed)
        grid, old = fp8_grid(dtype), packed.scales[expert]
        codes, values, scales = torch.empty_like(packed.codes[expert]), torch.empty_like(weight_NK), []
        given = (weight_NK, packed.codes[expert], codes, values, *(() if uniform is None else (uniform,)))
        by_part = zip(*(views_of_parts(tensor, parts, kinds) for tensor in given))
        for (weight, old_codes, own_codes, own_values, *numbers), own_scales in zip(by_part, _scales(old)):
            rounded = grid.round(weight, own_scales, old_codes, *numbers)
            own_codes.copy_(rounded.codes.view(torch.uint8))
            own_values.copy_(rounded.values)
            scales.append(rounded.scales)
        return Rounded(codes, torch.stack(scales).unflatten(0, (parts, kinds)).transpose(1, 2), values)

    def rows(self, packed: Quantized) -> list[torch.Tensor]:
        """See Format: rows of blocks."""
        return [packed.codes, packed.scales.flatten(1, 3)]


def _scales(scales: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the scales [blocks, blocks] of each part and kind of an expert."""
    return (blocks for part in scales for blocks in part.unbind(1))
