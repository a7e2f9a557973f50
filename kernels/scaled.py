"""FP8 products by groups in PyTorch: the arithmetic in which DeepSeek-V3's and Qwen3's FP8 checkpoints are served.

Rows are quantized as they are used: 128 columns of a row, a group, share a scale, beside 128 x 128 values of a weight
(quantized.py). Products of e4m3 values are summed in fp32 within a group, and the groups' sums times both scales
(arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .minifloat import E4M3_MAX, from_e4m3, to_e4m3
from .quantized import FP8_BLOCK, scales_in_fp32

SMALLEST = 1e-10  # what the largest value of a group is taken to be at least


class ScaledRows(NamedTuple):
    """Rows [M, K] in FP8: codes uint8 [M, K], the bytes of e4m3 values; scales fp32 [M, ceil(K / 128)]."""

    codes: torch.Tensor
    scales: torch.Tensor

    def values(self) -> torch.Tensor:
        """In fp32."""
        by_column = self.scales.repeat_interleave(FP8_BLOCK, -1)[:, : self.codes.shape[1]]
        return from_e4m3(self.codes) * by_column


def scale_rows(x_MK: torch.Tensor) -> ScaledRows:
    """The nearest codes, and scales with which a group's largest magnitude becomes the largest e4m3 value."""
    columns = x_MK.shape[1]
    groups = F.pad(x_MK.float(), (0, -columns % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
    largest = groups.abs().amax(2).clamp(min=SMALLEST)
    codes = to_e4m3(groups * (E4M3_MAX / largest)[:, :, None]).flatten(1)[:, :columns]
    return ScaledRows(codes.contiguous(), largest / E4M3_MAX)


def scaled_product(rows: ScaledRows, codes_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[M, N] in fp32: rows times a weight [N, K], whose scales are [P, blocks of N / P rows, 1, groups of K]."""
    parts = scales.shape[0]
    by_row = scales_in_fp32(scales)[:, :, 0].repeat_interleave(FP8_BLOCK, 1)[:, : len(codes_NK) // parts].flatten(0, 1)
    left, right = from_e4m3(rows.codes), from_e4m3(codes_NK)
    out = left.new_zeros(len(left), len(right))
    for g, (a, w) in enumerate(zip(left.split(FP8_BLOCK, 1), right.split(FP8_BLOCK, 1))):
        out += a @ w.T * rows.scales[:, g, None] * by_row[:, g]
    return out
