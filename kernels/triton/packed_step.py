"""One step of the product of packed weights and a few rows, some columns of the weight, in each format.

W warps have EIGHTS times eight of the weight's rows each, `weight_rows` being a tensor for each eight, and a row's
columns are divided among four lanes, as tensor cores have them: [W, 8 EIGHTS, 4].
"""

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
def _by_warp(eights):
    """Join the two or four tensors [8 WARPS, A] of `weight_rows` to one [WARPS, 8 EIGHTS, A], in which a warp's rows lie
    together."""
    WARPS: tl.constexpr = eights[0].shape[0] // 8
    A: tl.constexpr = eights[0].shape[1]
    if len(eights) == 2:
        joined = tl.permute(tl.reshape(tl.join(eights[0], eights[1]), (WARPS, 8, A, 2)), (0, 3, 1, 2))
        return tl.reshape(joined, (WARPS, 16, A))
    else:
        joined = tl.join(tl.join(eights[0], eights[2]), tl.join(eights[1], eights[3]))
        return tl.reshape(tl.permute(tl.reshape(joined, (WARPS, 8, A, 4)), (0, 3, 1, 2)), (WARPS, 32, A))


@triton.jit
def _load_scale_codes(
    scales, weight_row, expert, start, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """Load the codes of the scales, uint8 [rows, COUNT], of COUNT blocks from column `start` on; 0 past the end."""
    block = start // BLOCK + tl.arange(0, COUNT)[None, :]
    pointers = scales + expert.to(tl.int64) * (N * (K // BLOCK)) + weight_row[:, None] * (K // BLOCK) + block
    return tl.load(pointers) if K % (COUNT * BLOCK) == 0 else tl.load(pointers, mask=block < K // BLOCK, other=0)


@triton.jit
def _load_words(
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
    """Load words of CODES codes, int32 [WARPS, 8 EIGHTS, COUNT], from column `start` on; 0 past the end."""
    WIDTH: tl.constexpr = K // CODES
    offset = start // CODES + tl.arange(0, COUNT)[None, :]
    eights = ()
    for eight in tl.static_range(len(weight_rows)):
        pointers = words + expert.to(tl.int64) * (N * WIDTH) + weight_rows[eight][:, None] * WIDTH + offset
        eights += (tl.load(pointers) if K % STEP == 0 else tl.load(pointers, mask=offset < WIDTH, other=0),)
    return _by_warp(eights)


@triton.jit
def _load_by_lane(values, weight_rows, expert, start, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """Load [WARPS, 8 EIGHTS, 4], for each fourth of 128 columns from `start` on the value (scale or zero) of its group of
    GROUP columns; past the end that of the last group."""
    WIDTH: tl.constexpr = K // GROUP
    offset = tl.minimum(start + 32 * tl.arange(0, 4), K - 1)[None, :] // GROUP
    loaded = ()
    for eight in tl.static_range(len(weight_rows)):
        loaded += (tl.load(values + expert.to(tl.int64) * (N * WIDTH) + weight_rows[eight][:, None] * WIDTH + offset),)
    return _by_warp(loaded)


@triton.jit
def _load_x(pointers, start, each: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Load x [WARPS, 8, 4, 8] from column `start` on: eight columns for each of four lanes, `each` apart; 0 past the
    end."""
    column = tl.arange(0, 32)
    column = (start + column // 8 * each + column % 8)[None, :]
    x = tl.load(pointers + column) if K % (4 * BLOCK) == 0 else tl.load(pointers + column, mask=column < K, other=0.0)
    return tl.reshape(x, (pointers.shape[0] // 8, 8, 4, 8))


@triton.jit
def _add_dot(product, values, x, AT_ONCE: tl.constexpr):
    """Add values [W, A, 4, 8] @ x [W, 8, 4, 8]^T to a product [W, A, 8]; a lane gives tensor cores AT_ONCE of its eight
    values at a time."""
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
    """Add the product of four blocks from column `start` on: a lane has a fourth of each block, and the scale of one."""
    WARPS: tl.constexpr = product.shape[0]
    TALL: tl.constexpr = product.shape[1]
    offset = tl.load(state + _SCALE_OFFSET)
    eights = ()
    for eight in tl.static_range(len(weight_rows)):
        code = _load_scale_codes(scales, weight_rows[eight], expert, start, N, K, 64, 4)
        block = tl.minimum(start // 64 + tl.arange(0, 4), K // 64 - 1)[None, :]
        scale_of_scales = (
            expert * (N * (K // 64)) + weight_rows[eight][:, None] * (K // 64) + block
        ) // _SCALES_PER_SCALE
        scale_of_scales = look_up(state + _SCALE_SCALES, scale_of_scales, INTERPRETED)
        eights += ((scale_of_code(code, table, state, INTERPRETED) * scale_of_scales + offset) * _NF4_FACTOR,)
    scale = _by_warp(eights)
    for block in tl.static_range(4):
        word = _load_words(words, weight_rows, expert, start + 64 * block, N, K, 8, 256, 8)
        word = tl.split(tl.reshape(word, (WARPS, TALL, 4, 2)))
        partial = tl.zeros((WARPS, TALL, 8), tl.float32)
        for which in tl.static_range(2):
            columns = _load_x(x, start + 64 * block + 8 * which, 16, K, 64)
            # one word of four by permutations: arithmetic has time left, shared memory none
            values = nf4_values(word[which], table, state, block % 2 + which == 0, columns.dtype, INTERPRETED)
            partial = _add_dot(partial, values, columns, 4)
        # one of four lanes has this block's scale, which all four need
        block_scale = tl.gather(scale, tl.full(scale.shape, block, tl.int32), 2)
        product += tl.reshape(partial, (WARPS, TALL, 4, 2)) * block_scale[:, :, :, None]
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
    """Add the product of 128 columns from column `start` on, of which a lane has a fourth: one block of MXFP4, two of
    NVFP4 (without the tensor's scale), or a piece of one of INT4's groups."""
    WARPS: tl.constexpr = product.shape[0]
    TALL: tl.constexpr = product.shape[1]
    eights = ()
    for eight in tl.static_range(len(weight_rows)):
        if FORMAT == "mxfp4":
            code = _load_scale_codes(scales, weight_rows[eight], expert, start, N, K, 32, 4)
            eights += (half_scale(code.to(tl.int32)),)
        elif FORMAT == "nvfp4":
            eights += (half_e4m3_scale(_load_scale_codes(scales, weight_rows[eight], expert, start, N, K, 16, 8)),)
    if FORMAT == "mxfp4":
        lane_scale = _by_warp(eights)
        scale = lane_scale, lane_scale
    elif FORMAT == "nvfp4":
        scale = tl.split(tl.reshape(_by_warp(eights), (WARPS, TALL, 4, 2)))
    else:
        int4_scale = _load_by_lane(scales, weight_rows, expert, start, N, K, GROUP)
        if FORMAT == "uint4":
            zero = _load_by_lane(state, weight_rows, expert, start, N, K, GROUP).to(tl.int32)
        else:
            zero = tl.full((WARPS, TALL, 4), 8, tl.int32)
    words = _load_words(words, weight_rows, expert, start, N, K, 8, 128, 16)
    even, odd = tl.split(tl.reshape(words, (WARPS, TALL, 4, 2, 2)))
    first = tl.split(even)
    second = tl.split(odd)
    for which in tl.static_range(4):
        columns = _load_x(x, start + 8 * which, 32, K, 32)
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
    """Add the product of a block of columns from column `start` on: a lane has two times 16 columns, and the row's
    scale."""
    WARPS: tl.constexpr = product.shape[0]
    TALL: tl.constexpr = product.shape[1]
    BLOCKS: tl.constexpr = (K + _FP8_BLOCK - 1) // _FP8_BLOCK
    SCALE_ROWS: tl.constexpr = PARTS * KINDS * ((N // (PARTS * KINDS) + _FP8_BLOCK - 1) // _FP8_BLOCK)
    scales += expert.to(tl.int64) * (SCALE_ROWS * BLOCKS) + start // _FP8_BLOCK
    eights = ()
    for eight in tl.static_range(len(weight_rows)):
        # all four lanes of a row have the same
        row = fp8_scale_row(weight_rows[eight], N, PARTS, KINDS, _FP8_BLOCK)[:, None] * BLOCKS
        row += 0 * tl.arange(0, 4)[None, :]
        if scales.dtype.element_ty == tl.float32:
            eights += (look_up(scales, row, INTERPRETED),)
        else:
            eights += (fp8_scale_value(tl.load(scales + row)),)
    scale = _by_warp(eights)
    partial = tl.zeros((WARPS, TALL, 8), tl.float32)
    for half in tl.static_range(2):
        word = _load_words(words, weight_rows, expert, start + 64 * half, N, K, 4, 128, 16)
        even, odd = tl.split(tl.reshape(word, (WARPS, TALL, 4, 2, 2)))
        first = tl.split(even)
        second = tl.split(odd)
        for which in tl.static_range(2):
            columns = _load_x(x, start + 64 * half + 8 * which, 16, K, 32)
            values = fp8_values(first[which], second[which], columns.dtype, INTERPRETED)
            partial = _add_dot(partial, values, columns, 8)
    return product + tl.reshape(partial, (WARPS, TALL, 4, 2)) * scale[:, :, :, None]
