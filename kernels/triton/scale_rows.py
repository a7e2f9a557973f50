"""Rows in FP8 with a scale for every 128 columns, and a weight's codes transposed; ../scaled.py has both in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quantized import FP8_BLOCK
from ..scaled import SMALLEST, ScaledRows, ScaledWeight, transposed_scales, transposed_shape

GROUPS = 16  # of a row that a program takes
TRANSPOSED = 128  # rows, and columns, that a program transposes


@triton.jit
def scale_rows_kernel(x, codes, scales, columns, groups, smallest, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    place = row.to(tl.int64) * columns + column
    values = tl.load(x + place, mask=column < columns, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), smallest)
    scaled = values * (448.0 / largest)[:, None]
    tl.store(codes + place, scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=column < columns)
    tl.store(scales + row.to(tl.int64) * groups + group, largest / 448.0, mask=group < groups)


def scale_rows(x_MK: torch.Tensor, smallest: float = SMALLEST) -> ScaledRows:
    """x_MK is contiguous."""
    rows, columns = x_MK.shape
    groups = triton.cdiv(columns, FP8_BLOCK)
    codes = torch.empty_like(x_MK, dtype=torch.uint8)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x_MK.device)
    if rows:
        grid = rows, triton.cdiv(groups, GROUPS)
        sizes = {"GROUPS": GROUPS, "GROUP": FP8_BLOCK}
        scale_rows_kernel[grid](x_MK, codes, scales, columns, groups, smallest, **sizes, num_warps=4)
    return ScaledRows(codes, scales)


@triton.jit
def transpose_kernel(codes, out, rows, columns, out_rows, parts, SIZE: tl.constexpr):
    """rows, out_rows: of one of a weight's parts."""
    expert = (tl.program_id(2) // parts).to(tl.int64)
    part = tl.program_id(2) % parts
    row, column = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    place = ((expert * parts + part) * rows + row[:, None]) * columns + column[None, :]
    values = tl.load(codes + place, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0)
    place = (expert * columns + column[:, None]) * (parts * out_rows) + part * out_rows + row[None, :]
    tl.store(out + place, tl.trans(values), mask=(column < columns)[:, None] & (row < out_rows)[None, :])


def transposed(codes_ENK: torch.Tensor, scales: torch.Tensor) -> ScaledWeight:
    (num_experts, size_out, size_in), parts = codes_ENK.shape, scales.shape[1]
    out = codes_ENK.new_empty(transposed_shape(codes_ENK, parts))
    rows, out_rows = size_out // parts, out.shape[2] // parts
    grid = triton.cdiv(out_rows, TRANSPOSED), triton.cdiv(size_in, TRANSPOSED), num_experts * parts
    transpose_kernel[grid](codes_ENK, out, rows, size_in, out_rows, parts, SIZE=TRANSPOSED, num_warps=4)
    return ScaledWeight(out, transposed_scales(scales))
