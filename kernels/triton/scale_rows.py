"""Rows in FP8 with a scale for every 128 columns, in one pass; ../scaled.py has it in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quantized import FP8_BLOCK
from ..scaled import ScaledRows

GROUPS = 16  # of a row that a program takes


@triton.jit
def scale_rows_kernel(x, codes, scales, columns, groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    place = row.to(tl.int64) * columns + column
    values = tl.load(x + place, mask=column < columns, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-10)
    scaled = values * (448.0 / largest)[:, None]
    tl.store(codes + place, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=column < columns)
    tl.store(scales + row.to(tl.int64) * groups + group, largest / 448.0, mask=group < groups)


def scale_rows(x_MK: torch.Tensor) -> ScaledRows:
    """x_MK is contiguous."""
    rows, columns = x_MK.shape
    groups = triton.cdiv(columns, FP8_BLOCK)
    codes = torch.empty_like(x_MK, dtype=torch.uint8)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x_MK.device)
    if rows:
        grid = rows, triton.cdiv(groups, GROUPS)
        scale_rows_kernel[grid](x_MK, codes, scales, columns, groups, GROUPS=GROUPS, GROUP=FP8_BLOCK, num_warps=4)
    return ScaledRows(codes, scales)
