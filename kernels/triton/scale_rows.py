"""Rows in FP8 with a scale for every 128 columns, and a weight's codes transposed; ../scaled.py has both in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed.fp8 import FP8_BLOCK
from ..scaled import SMALLEST, ScaledRows, ScaledWeight, transposed_scales, transposed_shape
from .config import as_e4m3
from .launch import cdiv, launch_kernel

GROUPS = 16  # of a row that a program takes
TRANSPOSED = 128  # rows, and columns, that a program transposes


@triton.jit
def _e4m3(values, DTYPE: tl.constexpr):
    """Round values up to 448 to the nearest e4m3: as that type, or as bytes where a GPU has no such conversion."""
    if tl.uint8 == DTYPE:
        bits = values.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        code = (size + 0x7FFFF + (size >> 20 & 1) >> 20) - (120 << 3)
        # below 2^-6 in steps of 2^-9, which are those of fp32 beside 2^14
        small = (tl.abs(values) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(size < 0x3C800000, small, code), 0x7E)
        code = tl.where(size > 0x7F800000, 0x7F, code)  # NaN
        return (code | bits >> 24 & 0x80).to(tl.uint8)
    else:
        return values.to(DTYPE)


@triton.jit
def quantized(values, smallest, DTYPE: tl.constexpr):
    """Quantize groups [N, 128] in fp32. Returns (codes, scales)."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), smallest)
    inverse = 1.0 / largest * 448.0  # rounded as PyTorch does
    return _e4m3(values * inverse[:, None], DTYPE), largest / 448.0


@triton.jit
def scale_rows_kernel(
    x, codes, scales, COLUMNS: tl.constexpr, SMALLEST: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr
):
    """Quantize GROUPS groups of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    offset = row * COLUMNS + column
    values = tl.load(x + offset, mask=column < COLUMNS, other=0.0).to(tl.float32)
    code, scale = quantized(values, SMALLEST, codes.dtype.element_ty)
    tl.store(codes + offset, code, mask=column < COLUMNS)
    num_groups: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)


def scale_rows(x_MK: torch.Tensor, smallest: float = SMALLEST) -> ScaledRows:
    """Quantize x_MK, which is contiguous."""
    rows, columns = x_MK.shape
    groups = cdiv(columns, FP8_BLOCK)
    codes = torch.empty_like(x_MK, dtype=torch.uint8)
    scales = x_MK.new_empty(rows, groups, dtype=torch.float32)
    if rows:
        grid, constants = (rows, cdiv(groups, GROUPS)), (columns, smallest, GROUPS, FP8_BLOCK)
        launch_kernel(scale_rows_kernel, grid, (x_MK, as_e4m3(codes), scales), (), constants, num_warps=4)
    return ScaledRows(codes, scales)


@triton.jit
def transpose_kernel(
    codes,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Transpose codes by tiles. ROWS, OUT_ROWS: of one of a weight's parts."""
    expert = (tl.program_id(2) // PARTS).to(tl.int64)
    part = tl.program_id(2) % PARTS
    row, column = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    offset = ((expert * PARTS + part) * ROWS + row[:, None]) * COLUMNS + column[None, :]
    values = tl.load(codes + offset, mask=(row < ROWS)[:, None] & (column < COLUMNS)[None, :], other=0)
    offset = (expert * COLUMNS + column[:, None]) * (PARTS * OUT_ROWS) + part * OUT_ROWS + row[None, :]
    tl.store(out + offset, tl.trans(values), mask=(column < COLUMNS)[:, None] & (row < OUT_ROWS)[None, :])


def transposed(codes_ENK: torch.Tensor, scales: torch.Tensor) -> ScaledWeight:
    (num_experts, size_out, size_in), parts = codes_ENK.shape, scales.shape[1]
    out = codes_ENK.new_empty(transposed_shape(codes_ENK, parts))
    rows, out_rows = size_out // parts, out.shape[2] // parts
    grid = cdiv(out_rows, TRANSPOSED), cdiv(size_in, TRANSPOSED), num_experts * parts
    constants = rows, size_in, out_rows, parts, TRANSPOSED
    launch_kernel(transpose_kernel, grid, (codes_ENK, out), (), constants, num_warps=4)
    return ScaledWeight(out, transposed_scales(scales))
