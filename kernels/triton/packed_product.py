"""The product of packed weights and a few rows, by which gemm_packed.py computes up and down."""

from __future__ import annotations

import triton
import triton.language as tl

from ..packed.fp8 import FP8_BLOCK
from ..packed.nf4 import SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE
from .dequantize import fp8_scale_row, fp8_scale_value
from .packed_tile import (
    NF4_FACTOR,
    fp8_values,
    gathered,
    half_e4m3_scale,
    half_scale,
    int4_values,
    mxfp4_values,
    nf4_values,
    scale_of_code,
)

_SCALE_OFFSET, _SCALE_SCALES = tl.constexpr(SCALE_OFFSET), tl.constexpr(SCALE_SCALES.start)
_FP8_BLOCK = tl.constexpr(FP8_BLOCK)
_SCALES_PER_SCALE, _NF4_FACTOR = tl.constexpr(SCALES_PER_SCALE), tl.constexpr(NF4_FACTOR)


@triton.jit
def _weight_row(place, tile, N: tl.constexpr, HEIGHT: tl.constexpr, PAIRS: tl.constexpr):
    """Return the weight's rows at places of a tile: in their order, or of pairs eight gates, then their eight ups, and
    so on: on tensor cores a thread has both of a pair. Past the end the last rows again."""
    if PAIRS is None:
        return tl.minimum(tile * HEIGHT + place, N - 1)
    else:
        pair = tl.minimum(tile * (HEIGHT // 2) + place // 16 * 8 + place % 8, N // 2 - 1)
        is_up = place // 8 % 2
        return 2 * pair + is_up if PAIRS == "interleaved" else pair + is_up * (N // 2)


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
def _x(pointers, start, each: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Load x [WARPS, 8, 4, 8] from `start` on, of which a lane has 8 of every `each`; 0 past the end."""
    column = tl.arange(0, 32)
    column = (start + column // 8 * each + column % 8)[None, :]
    x = tl.load(pointers + column) if K % (4 * BLOCK) == 0 else tl.load(pointers + column, mask=column < K, other=0.0)
    return tl.reshape(x, (pointers.shape[0] // 8, 8, 4, 8))


@triton.jit
def _add_nf4(
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
        of_scale = gathered(state + _SCALE_SCALES, of_scale, INTERPRETED)
        groups += ((scale_of_code(code, table, state, INTERPRETED) * of_scale + offset) * _NF4_FACTOR,)
    scale = _by_warp(groups)
    for block in tl.static_range(4):
        word = _words(words, weight_rows, expert, start + 64 * block, N, K, 8, 256, 8)
        word = tl.split(tl.reshape(word, (WARPS, TALL, 4, 2)))
        part = tl.zeros((WARPS, TALL, 8), tl.float32)
        for which in tl.static_range(2):
            columns = _x(x, start + 64 * block + 8 * which, 16, K, 64)
            # one word of four by arithmetic, which has time where shared memory has none
            values = nf4_values(word[which], table, state, block % 2 + which == 0, columns.dtype, INTERPRETED)
            part = _add_dot(part, values, columns, 4)
        # among four lanes
        of_block = tl.gather(scale, tl.full(scale.shape, block, tl.int32), 2)
        product += tl.reshape(part, (WARPS, TALL, 4, 2)) * of_block[:, :, :, None]
    return product


@triton.jit
def _of_lanes(parts, weight_rows, expert, start, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """Load [WARPS, 8 GROUPS, 4], what groups of GROUP columns have of each fourth of 128 columns from `start` on; that of
    the last columns past the end."""
    WIDTH: tl.constexpr = K // GROUP
    place = tl.minimum(start + 32 * tl.arange(0, 4), K - 1)[None, :] // GROUP
    of_rows = ()
    for group in tl.static_range(len(weight_rows)):
        of_rows += (tl.load(parts + expert.to(tl.int64) * (N * WIDTH) + weight_rows[group][:, None] * WIDTH + place),)
    return _by_warp(of_rows)


@triton.jit
def _add_words(
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
def _nvfp4_factor(state, weight_row, expert, N: tl.constexpr, PARTS: tl.constexpr, KINDS: tl.constexpr):
    """Load the scale of the tensor that each row of the weight is from."""
    return tl.load(state + expert * (PARTS * KINDS) + weight_row // (N // PARTS) * KINDS + weight_row % KINDS)


@triton.jit
def _add_fp8(
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
            groups += (gathered(scales, row, INTERPRETED),)
        else:
            groups += (fp8_scale_value(tl.load(scales + row)),)
    scale = _by_warp(groups)
    part = tl.zeros((WARPS, TALL, 8), tl.float32)
    for half in tl.static_range(2):
        word = _words(words, weight_rows, expert, start + 64 * half, N, K, 4, 128, 16)
        even, odd = tl.split(tl.reshape(word, (WARPS, TALL, 4, 2, 2)))
        first = tl.split(even)
        second = tl.split(odd)
        for which in tl.static_range(2):
            columns = _x(x, start + 64 * half + 8 * which, 16, K, 32)
            values = fp8_values(first[which], second[which], columns.dtype, INTERPRETED)
            part = _add_dot(part, values, columns, 8)
    return product + tl.reshape(part, (WARPS, TALL, 4, 2)) * scale[:, :, :, None]


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
def _packed_product(
    x,
    words,
    scales,
    state,
    table,
    expert,
    tile,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    PAIRS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WARPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute weight @ x^T [HEIGHT, 8] in fp32; x [8 WARPS, 1] points to the rows of x [8, K], WARPS times.

    A warp has HEIGHT / WARPS rows of the weight, and all of x. As tensor cores lay a tile out, a group of four lanes has
    every eighth row. STEP columns are taken at a time, and GROUP of a row share a scale of INT4; PARTS and KINDS are the
    weight's order (../packed).
    """
    GROUPS: tl.constexpr = HEIGHT // WARPS // 8
    slot = tl.arange(0, WARPS * 8)
    place = slot // 8 * (GROUPS * 8) + slot % 8
    weight_rows = ()
    for group in tl.static_range(GROUPS):
        weight_rows += (_weight_row(place + 8 * group, tile, N, HEIGHT, PAIRS),)
    SCALED_LATER: tl.constexpr = FORMAT == "nf4" or FORMAT == "fp8"  # a lane's two columns apart
    product = tl.zeros((WARPS, GROUPS * 8, 4, 2) if SCALED_LATER else (WARPS, GROUPS * 8, 8), tl.float32)
    for start in range(0, K, STEP):
        if FORMAT == "nf4":
            product = _add_nf4(product, x, words, scales, state, table, weight_rows, expert, start, N, K, INTERPRETED)
        elif FORMAT == "fp8":
            product = _add_fp8(product, x, words, scales, weight_rows, expert, start, N, K, PARTS, KINDS, INTERPRETED)
        else:
            product = _add_words(
                product, x, words, scales, state, weight_rows, expert, start, N, K, FORMAT, GROUP, INTERPRETED
            )
    return tl.reshape(product, (HEIGHT, 8))


@triton.jit
def _add_lora(
    product,
    shrunk,
    factor,
    expert,
    row,
    weight_row,
    J: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_J: tl.constexpr,
):
    """Return product + factor[expert] @ shrunk[row]^T, shrunk [P, J], factor [E, N, J]; product itself without an
    adapter."""
    if shrunk is not None:
        DEPTH: tl.constexpr = 16 if J <= 16 else 32
        factor_row = factor + expert.to(tl.int64) * STRIDE_E + weight_row[:, None] * STRIDE_N
        shrunk_row = shrunk + row.to(tl.int64)[:, None] * J
        for start in tl.range(0, J, DEPTH, num_stages=1):
            j = start + tl.arange(0, DEPTH)
            left = tl.load(factor_row + j[None, :] * STRIDE_J, mask=(j < J)[None, :], other=0.0)
            right = tl.load(shrunk_row + j[None, :], mask=(j < J)[None, :], other=0.0)
            product = tl.dot(left, tl.trans(right), product)
    return product


@triton.jit
def packed_linear(
    x,
    token,
    words,
    scales,
    state,
    table,
    bias,
    shrunk,
    factor,
    expert,
    tile,
    first,
    end,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr,
    BIAS_STRIDE_N: tl.constexpr,
    J: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_N: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr,
    PAIRS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WARPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute weight[e] @ x[token[r]]^T (+ factor[e] @ shrunk[r]^T) (+ bias[e]) [HEIGHT, 8] in fp32, r = first, first
    + 1, ...

    PAIRS: the order of the weight's rows, as in `_weight_row`.
    """
    # past the end the last row again
    source = tl.minimum(first + tl.arange(0, WARPS * 8) % 8, end - 1)
    if token is not None:
        source = tl.load(token + source)
    product = _packed_product(
        (x + source.to(tl.int64) * K)[:, None],
        words,
        scales,
        state,
        table,
        expert,
        tile,
        N,
        K,
        FORMAT,
        GROUP,
        STEP,
        PARTS,
        KINDS,
        PAIRS,
        HEIGHT,
        WARPS,
        INTERPRETED,
    )
    weight_row = _weight_row(tl.arange(0, HEIGHT), tile, N, HEIGHT, PAIRS)
    if FORMAT == "nvfp4":
        product *= _nvfp4_factor(state, weight_row, expert, N, PARTS, KINDS)[:, None]
    product = _add_lora(
        product,
        shrunk,
        factor,
        expert,
        tl.minimum(first + tl.arange(0, 8), end - 1),
        weight_row,
        J,
        FACTOR_STRIDE_E,
        FACTOR_STRIDE_N,
        FACTOR_STRIDE_J,
    )
    if bias is not None:
        bias_row = bias + expert.to(tl.int64) * BIAS_STRIDE_E + weight_row * BIAS_STRIDE_N
        product += tl.load(bias_row).to(tl.float32)[:, None]
    return product
