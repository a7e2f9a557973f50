"""FP8 products by groups in PyTorch: the arithmetic in which DeepSeek-V3's and Qwen3's FP8 checkpoints are served.

Rows are quantized as they are used: 128 columns of a row, a group, share a scale, beside 128 x 128 values of a weight
(packed/fp8.py). Products of e4m3 values are summed in fp32 within a group, and the groups' sums times both scales
(arXiv 2412.19437, section 3.3).

Backward contracts over a weight's rows, and groups are counted along what is contracted: a weight is `transposed`, which
leaves its blocks what they are, and gradients are quantized as rows are, those of gate and up apart (`scale_halves`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .minifloat import E4M3_MAX, from_e4m3, to_e4m3
from .packed.fp8 import FP8_BLOCK, scales_in_fp32

SMALLEST = 1e-10  # what the largest value of a group is taken to be at least
SMALLEST_GRADIENT = 1e-30  # of a gradient, whose size is that of the loss: for it 1e-10 is not small


class ScaledRows(NamedTuple):
    """Rows [M, K] in FP8: codes uint8 [M, K], the bytes of e4m3 values; scales fp32 [M, ceil(K / 128)]."""

    codes: torch.Tensor
    scales: torch.Tensor

    def values(self) -> torch.Tensor:
        """Compute the values [M, K] in fp32."""
        by_column = self.scales.repeat_interleave(FP8_BLOCK, -1)[:, : self.codes.shape[1]]
        return from_e4m3(self.codes) * by_column


class ScaledWeight(NamedTuple):
    """A weight [E, N, K] in FP8: codes uint8 [E, N, K] and scales [E, parts, blocks of N / parts rows, 1, groups of K]; a
    packed one, or a transposed one."""

    codes: torch.Tensor
    scales: torch.Tensor


def empty_rows(like: ScaledRows, num_rows: int, columns: int) -> ScaledRows:
    """Allocate room for rows, on the device of others."""
    groups = -(-columns // FP8_BLOCK)
    return ScaledRows(like.codes.new_empty(num_rows, columns), like.scales.new_empty(num_rows, groups))


def scale_rows(x_MK: torch.Tensor, smallest: float = SMALLEST) -> ScaledRows:
    """Quantize rows to the nearest codes, with scales by which a group's largest magnitude is the largest e4m3 value."""
    columns = x_MK.shape[1]
    groups = F.pad(x_MK.float(), (0, -columns % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
    largest = groups.abs().amax(2).clamp(min=smallest)
    codes = to_e4m3(groups * (E4M3_MAX / largest)[:, :, None]).flatten(1)[:, :columns]
    return ScaledRows(codes.contiguous(), largest / E4M3_MAX)


def scaled_product(rows: ScaledRows, codes_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a weight [N, K] whose scales are [P, blocks of N / P rows, 1, groups of K], to [M, N] in fp32."""
    parts = scales.shape[0]
    by_row = scales_in_fp32(scales)[:, :, 0].repeat_interleave(FP8_BLOCK, 1)[:, : len(codes_NK) // parts].flatten(0, 1)
    left, right = from_e4m3(rows.codes), from_e4m3(codes_NK)
    out = left.new_zeros(len(left), len(right))
    for g, (a, w) in enumerate(zip(left.split(FP8_BLOCK, 1), right.split(FP8_BLOCK, 1))):
        out += a @ w.T * rows.scales[:, g, None] * by_row[:, g]
    return out


def scale_halves(dh_M2I: torch.Tensor) -> ScaledRows:
    """Quantize dh. Its gates' and its ups' groups are counted apart, as gate_up's blocks are, and both halves are filled
    up with zeros to whole groups: [M, 2 I'], I' a multiple of 128."""
    halves = dh_M2I.unflatten(1, (2, -1))
    return scale_rows(F.pad(halves, (0, -halves.shape[2] % FP8_BLOCK)).flatten(1), SMALLEST_GRADIENT)


def transposed_shape(codes: torch.Tensor, parts: int) -> tuple[int, int, int]:
    """Compute the shape of a transposed weight's codes: [E, K, N], or of a gate and an up [E, K, 2 I'], in the order of
    `scale_halves`."""
    num_experts, size_out, size_in = codes.shape
    depth = size_out if parts == 1 else parts * -(-size_out // parts // FP8_BLOCK) * FP8_BLOCK
    return num_experts, size_in, depth


def transposed(codes_ENK: torch.Tensor, scales: torch.Tensor) -> ScaledWeight:
    """Transpose a weight for backward, whose products contract over its rows."""
    parts = scales.shape[1]
    shape = transposed_shape(codes_ENK, parts)
    filling = 0, 0, 0, shape[2] // parts - codes_ENK.shape[1] // parts
    by_part = F.pad(codes_ENK.unflatten(1, (parts, -1)), filling)
    return ScaledWeight(by_part.flatten(1, 2).transpose(1, 2).contiguous(), transposed_scales(scales))


def block_scales(weight) -> torch.Tensor:
    """Convert the scales of a ScaledWeight or of a packed weight to fp32 [E, blocks of rows, groups]."""
    return scales_in_fp32(weight.scales).flatten(1, 3)


def transposed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Transpose [E, P, B, 1, G] to [E, 1, G, 1, P B]."""
    return scales.flatten(1, 3).transpose(1, 2)[:, None, :, None].contiguous()
