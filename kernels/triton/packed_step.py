"""One step of the product of packed weights and a few rows, some columns of the weight, in each format."""

from __future__ import annotations

import triton
import triton.language as tl

from ..packed.fp8 import FP8_BLOCK
from ..packed.nf4 import SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE
from .dequantize import fp8_scale_row, fp8_scale_value
from .packed_tile import (
    NF4_FACTOR,
    fp8_values,
    half_e4m3_scale,
    half_scale,
    int4_values,
    look_up,
    mxfp4_values,
    nf4_values,
    scale_of_code,
)

_SCALE_OFFSET, _SCALE_SCALES = tl.constexpr(SCALE_OFFSET), tl.constexpr(SCALE_SCALES.start)
_FP8_BLOCK = tl.constexpr(FP8_BLOCK)
_SCALES_PER_SCALE, _NF4_FACTOR = tl.constexpr(SCALES_PER_SCALE), tl.constexpr(NF4_FACTOR)


@triton.jit
def _by_warp(groups):
    """View two or four tensors [8 WARPS, A] as one [WARPS, 8 GROUPS, A]: a warp's rows are those of all groups."""
    WARPS: tl.constexpr = groups[0].shape[0] // 8
    A: tl.constexpr = groups[0].shape[1]
    if len(groups) == 2:
        joined = tl.permute(tl.reshape(tl.join(groups[0], groups[1]), (WARPS, 8, A, 2)), (0, 3, 1, 2))
        return tl.reshape(joined, (WARPS, 16, A))
    else:
        joined = tl.join(tl.join(groups[0], groups[2]), tl.join(groups[1], groups[3]))
        return tl.reshape(tl.permute(tl.reshape(joined, (WARPS, 8, A, 4)), (0, 3, 1, 2)), (WARPS, 32, A))


@triton.jit
def _scale_codes(
    scales, weight_row, expert, start, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """Load uint8 [rows, COUNT], those of so many blocks from `start` on; 0 past the end."""
    block = start // BLOCK + tl.arange(0, COUNT)[None, :]
    pointers = scales + expert.to(tl.int64) * (N * (K // BLOCK)) + weight_row[:, None] * (K // BLOCK) + block
    return tl.load(pointers) if K % (COUNT * BLOCK) == 0 else tl.load(pointers, mask=block < K // BLOCK, other=0)


@triton.jit
def _words(
    words,
    weight_rows,
    expert,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    CODES: tl.constexpr,
    STEP: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Load int32 [WARPS, 8 GROUPS, COUNT] of so many CODES each from `start` on; 0 past the end."""
    WIDTH: tl.constexpr = K // CODES
    place = start // CODES + tl.arange(0, COUNT)[None, :]
    groups = ()
    for group in tl.static_range(len(weight_rows)):
        pointers = words + expert.to(tl.int64) * (N * WIDTH) + weight_rows[group][:, None] * WIDTH + place
        groups += (tl.load(pointers) if K % STEP == 0 else tl.load(pointers, mask=place < WIDTH, other=0),)
    return _by_warp(groups)


@triton.jit
def _of_lanes(of_groups, weight_rows, expert, start, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """Load [WARPS, 8 GROUPS, 4], what groups of GROUP columns have of each fourth of 128 columns from `start` on; that of
    the last columns past the end."""
    WIDTH: tl.constexpr = K // GROUP
    place = tl.minimum(start + 32 * tl.arange(0, 4), K - 1)[None, :] // GROUP
    of_rows = ()
    for group in tl.static_range(len(weight_rows)):
        of_rows += (
            tl.load(of_groups + expert.to(tl.int64) * (N * WIDTH) + weight_rows[group][:, None] * WIDTH + place),
        )
    return _by_warp(of_rows)


@triton.jit
def _x(pointers, start, each: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Load x [WARPS, 8, 4, 8] from `start` on, of which a lane has 8 of every `each`; 0 past the end."""
    column = tl.arange(0, 32)
    column = (start + column // 8 * each + column % 8)[None, :]
    x = tl.load(pointers + column) if K % (4 * BLOCK) == 0 else tl.load(pointers + column, mask=column < K, other=0.0)
    return tl.reshape(x, (pointers.shape[0] // 8, 8, 4, 8))


@triton.jit
def _add_dot(product, values, x, AT_ONCE: tl.constexpr):
    """Return product [W, A, 8] + values [W, A, 4, 8] @ x [W, 8, 4, 8]^T, where a lane gives tensor cores AT_ONCE of
    eight values at a time."""
    W: tl.constexpr = values.shape[0]
    A: tl.constexpr = values.shape[1]
    values = tl.permute(tl.reshape(values, (W, A, 4, 8 // AT_ONCE, AT_ONCE)), (0, 1, 3, 2, 4))
    x = tl.permute(tl.reshape(x, (W, 8, 4, 8 // AT_ONCE, AT_ONCE)), (0, 1, 3, 2, 4))
    return tl.dot(tl.reshape(values, (W, A, 32)), tl.permute(tl.reshape(x, (W, 8, 32)), (0, 2, 1)), product)


@triton.jit
def add_nf4(
    product,
    x,
    words,
    scales,
    state,
    table,
    weight_rows,
    expert,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return product + that of four blocks from `start` on: a lane has a fourth of each block, and the scale of one."""
    WARPS: tl.constexpr = product.shape[0]
    TALL: tl.constexpr = product.shape[1]
    offset = tl.load(state + _SCALE_OFFSET)
    groups = ()
    for group in tl.static_range(len(weight_rows)):
        code = _scale_codes(scales, weight_rows[group], expert, start, N, K, 64, 4)
        block = tl.minimum(start // 64 + tl.arange(0, 4), K // 64 - 1)[None, :]
        of_scale = (expert * (N * (K // 64)) + weight_rows[group][:, None] * (K // 64) + block) // _SCALES_PER_SCALE
        of_scale = look_up(state + _SCALE_SCALES, of_scale, INTERPRETED)
        groups += ((scale_of_code(code, table, state, INTERPRETED) * of_scale + offset) * _NF4_FACTOR,)
    scale = _by_warp(groups)
    for block in tl.static_range(4):
        word = _words(words, weight_rows, expert, start + 64 * block, N, K, 8, 256, 8)
        word = tl.split(tl.reshape(word, (WARPS, TALL, 4, 2)))
        partial = tl.zeros((WARPS, TALL, 8), tl.float32)
        for which in tl.static_range(2):
            columns = _x(x, start + 64 * block + 8 * which, 16, K, 64)
            # one word of four by arithmetic, which has time where shared memory has none
            values = nf4_values(word[which], table, state, block % 2 + which == 0, columns.dtype, INTERPRETED)
            partial = _add_dot(partial, values, columns, 4)
        # among four lanes
        of_block = tl.gather(scale, tl.full(scale.shape, block, tl.int32), 2)
        product += tl.reshape(partial, (WARPS, TALL, 4, 2)) * of_block[:, :, :, None]
    return product


@triton.jit
def add_words(
    product,
    x,
    words,
    scales,
    state,
    weight_rows,
    expert,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return product + that of 128 columns from `start` on, a fourth of them a lane: a block of MXFP4, two of NVFP4,
    without the tensor's scale, or a part of INT4's group."""
    WARPS: tl.constexpr = product.shape[0]
    TALL: tl.constexpr = product.shape[1]
    groups = ()
    for group in tl.static_range(len(weight_rows)):
        if FORMAT == "mxfp4":
            code = _scale_codes(scales, weight_rows[group], expert, start, N, K, 32, 4)
            groups += (half_scale(code.to(tl.int32)),)
        elif FORMAT == "nvfp4":
            groups += (half_e4m3_scale(_scale_codes(scales, weight_rows[group], expert, start, N, K, 16, 8)),)
    if FORMAT == "mxfp4":
        of_lane = _by_warp(groups)
        scale = of_lane, of_lane
    elif FORMAT == "nvfp4":
        scale = tl.split(tl.reshape(_by_warp(groups), (WARPS, TALL, 4, 2)))
    else:
        int4_scale = _of_lanes(scales, weight_rows, expert, start, N, K, GROUP)
        if FORMAT == "uint4":
            zero = _of_lanes(state, weight_rows, expert, start, N, K, GROUP).to(tl.int32)
        else:
            zero = tl.full((WARPS, TALL, 4), 8, tl.int32)
    words = _words(words, weight_rows, expert, start, N, K, 8, 128, 16)
    even, odd = tl.split(tl.reshape(words, (WARPS, TALL, 4, 2, 2)))
    first = tl.split(even)
    second = tl.split(odd)
    for which in tl.static_range(4):
        columns = _x(x, start + 8 * which, 32, K, 32)
        word = first[which // 2] if which % 2 == 0 else second[which // 2]
        if FORMAT == "int4" or FORMAT == "uint4":
            values = int4_values(word, zero, int4_scale, columns.dtype, INTERPRETED)
        else:
            values = mxfp4_values(word, scale[which // 2], columns.dtype, INTERPRETED)
        columns = tl.permute(tl.reshape(columns, (WARPS, 8, 4, 2, 4)), (0, 1, 2, 4, 3))
        product = _add_dot(product, values, tl.reshape(columns, (WARPS, 8, 4, 8)), 8)
    return product


@triton.jit
def add_fp8(
    product,
    x,
    words,
    scales,
    weight_rows,
    expert,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return product + that of a block of columns from `start` on: a lane has two times 16 of a row, and the row's
    scale."""
    WARPS: tl.constexpr = product.shape[0]
    TALL: tl.constexpr = product.shape[1]
    BLOCKS: tl.constexpr = (K + _FP8_BLOCK - 1) // _FP8_BLOCK
    SCALE_ROWS: tl.constexpr = PARTS * KINDS * ((N // (PARTS * KINDS) + _FP8_BLOCK - 1) // _FP8_BLOCK)
    scales += expert.to(tl.int64) * (SCALE_ROWS * BLOCKS) + start // _FP8_BLOCK
    groups = ()
    for group in tl.static_range(len(weight_rows)):
        # the same for four lanes
        row = fp8_scale_row(weight_rows[group], N, PARTS, KINDS, _FP8_BLOCK)[:, None] * BLOCKS
        row += 0 * tl.arange(0, 4)[None, :]
        if scales.dtype.element_ty == tl.float32:
            groups += (look_up(scales, row, INTERPRETED),)
        else:
            groups += (fp8_scale_value(tl.load(scales + row)),)
    scale = _by_warp(groups)
    partial = tl.zeros((WARPS, TALL, 8), tl.float32)
    for half in tl.static_range(2):
        word = _words(words, weight_rows, expert, start + 64 * half, N, K, 4, 128, 16)
        even, odd = tl.split(tl.reshape(word, (WARPS, TALL, 4, 2, 2)))
        first = tl.split(even)
        second = tl.split(odd)
        for which in tl.static_range(2):
            columns = _x(x, start + 64 * half + 8 * which, 16, K, 32)
            values = fp8_values(first[which], second[which], columns.dtype, INTERPRETED)
            partial = _add_dot(partial, values, columns, 8)
    return product + tl.reshape(partial, (WARPS, TALL, 4, 2)) * scale[:, :, :, None]
