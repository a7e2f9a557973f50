"""FP8 as DeepSeek-V3's and Qwen's checkpoints have it: E4M3 values, and a scale for each block of rows and columns."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..errors import CheckpointError
from ..kernels.minifloat import E4M3_MAX, to_e4m3
from ..kernels.quantized import FP8_BLOCK, Quantized
from .format import Format, HubFormat, Stored
from .grid import POWER_BIAS, Grid, ceiled_exponent, powers_of_two

FP8_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)  # what stores them; bytes: E8M0
BLOCK = (FP8_BLOCK, FP8_BLOCK)


class FP8(Format):
    """Experts in blocks of 128 x 128, the gates' and the ups' apart."""

    name, parts, loss, element_size = "fp8", ("values", "scale_inv"), 3, 1.1
    values: ClassVar = {"values": torch.float8_e4m3fn, "scale_inv": torch.float8_e8m0fnu}

    def rows(self, packed: Quantized) -> list[torch.Tensor]:
        """See Format: rows of blocks."""
        return [packed.codes, packed.scales.flatten(1, 3)]


class HubFP8(HubFormat):
    """X.weight float8_e4m3 [N, K], and X.weight_scale_inv [ceil(N / block), ceil(K / block)]: fp32, bf16, or E8M0.

    block: rows and columns that share a scale. has_powers: whether scales are powers of two in any dtype.
    """

    name, dtype, scales = "fp8", torch.float8_e4m3fn, ("_scale_inv",)

    def __init__(self, block: tuple[int, int] = BLOCK, has_powers: bool = False):
        self.block, self.has_powers, self.has_our_blocks = block, has_powers, block == BLOCK

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """See HubFormat. The last blocks are cut off."""
        if len(shape) != 2:
            raise CheckpointError(f"fp8 tensors have two dimensions; {name} has shape {tuple(shape)}")
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.block))
        return dict(zip(self.names(name), ((tuple(shape), (self.dtype,)), (blocks, FP8_SCALES))))

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See HubFormat."""
        dtype, has_powers = scales[0].dtype, self.has_powers

        def fresh(largest: torch.Tensor) -> torch.Tensor:
            ideal = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
            if dtype.itemsize == 1:
                exponent = ceiled_exponent(ideal).clamp(-POWER_BIAS, POWER_BIAS)
                return (exponent + POWER_BIAS).to(torch.uint8).view(dtype)
            if has_powers:
                return torch.exp2(ceiled_exponent(ideal).float()).to(dtype)
            rounded_up = ideal if dtype == torch.float32 else ideal * (1 + torch.finfo(dtype).eps)
            return rounded_up.to(dtype)

        def factors(scales: torch.Tensor) -> torch.Tensor:
            return powers_of_two(scales).float() if scales.dtype.itemsize == 1 else scales.float()

        def codes(scaled: torch.Tensor) -> torch.Tensor:
            return to_e4m3(scaled).view(torch.float8_e4m3fn)

        return Grid(*self.block, fresh, factors, codes, torch.Tensor.float)

    def dense_rows(self, weight: torch.Tensor, scales: torch.Tensor, rows: int, first: int) -> torch.Tensor:
        """Some rows in fp32, from the `first` on, of a matrix with `rows` rows, by the scales of all of it."""
        self.check(weight.new_empty(rows, weight.shape[1], device="meta"), scales)
        return self.grid(scales).dense(weight, scales, first)

    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """See HubFormat."""
        self.check(*tensors)
        weight, scales = tensors
        stored = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales.float()
        return Quantized(weight.view(torch.uint8), stored)

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """See HubFormat."""
        return scales.unsqueeze(3)
