"""The product of packed weights and a few rows, by which gemm_packed.py computes up and down."""

from __future__ import annotations

import triton
import triton.language as tl

from .packed_step import add_fp8, add_nf4, add_words


@triton.jit
def _weight_row(position, tile, N: tl.constexpr, HEIGHT: tl.constexpr, GATE_UP_ORDER: tl.constexpr):
    """Map positions in a tile to rows of the weight; past the end the last rows again.

    GATE_UP_ORDER: None without a gate, where rows keep their order. Otherwise "interleaved" or "concatenated" is how the
    weight has gates and ups; a tile has eight gates, then their eight ups, and so on, because then a thread of tensor
    cores has a gate and its up.
    """
    if GATE_UP_ORDER is None:
        return tl.minimum(tile * HEIGHT + position, N - 1)
    else:
        column = tl.minimum(tile * (HEIGHT // 2) + position // 16 * 8 + position % 8, N // 2 - 1)
        is_up = position // 8 % 2
        return 2 * column + is_up if GATE_UP_ORDER == "interleaved" else column + is_up * (N // 2)


@triton.jit
def _nvfp4_factor(state, weight_row, expert, N: tl.constexpr, PARTS: tl.constexpr, KINDS: tl.constexpr):
    """Load the scale of the tensor that each row of the weight is from."""
    return tl.load(state + expert * (PARTS * KINDS) + weight_row // (N // PARTS) * KINDS + weight_row % KINDS)


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
    GATE_UP_ORDER: tl.constexpr,
    HEIGHT: tl.constexpr,
    WARPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute weight @ x^T [HEIGHT, 8] in fp32; x [8 WARPS, 1] points to the rows of x [8, K], WARPS times.

    A warp has HEIGHT / WARPS rows of the weight, and all of x. As tensor cores lay a tile out, four lanes have every
    eighth row: a warp's rows are ROWS_OF_EIGHT times eight, and `weight_rows` has one tensor for each. STEP columns are
    taken at a time, and GROUP of a row share a scale of INT4; PARTS and KINDS are the weight's order (../packed).
    """
    ROWS_OF_EIGHT: tl.constexpr = HEIGHT // WARPS // 8
    slot = tl.arange(0, WARPS * 8)
    position = slot // 8 * (ROWS_OF_EIGHT * 8) + slot % 8
    weight_rows = ()
    for eight in tl.static_range(ROWS_OF_EIGHT):
        weight_rows += (_weight_row(position + 8 * eight, tile, N, HEIGHT, GATE_UP_ORDER),)
    SCALED_LATER: tl.constexpr = FORMAT == "nf4" or FORMAT == "fp8"  # a lane's two columns apart
    product = tl.zeros((WARPS, ROWS_OF_EIGHT * 8, 4, 2) if SCALED_LATER else (WARPS, ROWS_OF_EIGHT * 8, 8), tl.float32)
    for start in range(0, K, STEP):
        if FORMAT == "nf4":
            product = add_nf4(product, x, words, scales, state, table, weight_rows, expert, start, N, K, INTERPRETED)
        elif FORMAT == "fp8":
            product = add_fp8(product, x, words, scales, weight_rows, expert, start, N, K, PARTS, KINDS, INTERPRETED)
        else:
            product = add_words(
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
    """Add an adapter's factor[expert] @ shrunk[row]^T, shrunk [P, J], factor [E, N, J], to a product; nothing without
    one."""
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
    GATE_UP_ORDER: tl.constexpr,
    HEIGHT: tl.constexpr,
    WARPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute weight[e] @ x[token[r]]^T (+ factor[e] @ shrunk[r]^T) (+ bias[e]) [HEIGHT, 8] in fp32, r = first, first
    + 1, ...

    GATE_UP_ORDER: the order of the weight's rows, as in `_weight_row`.
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
        GATE_UP_ORDER,
        HEIGHT,
        WARPS,
        INTERPRETED,
    )
    weight_row = _weight_row(tl.arange(0, HEIGHT), tile, N, HEIGHT, GATE_UP_ORDER)
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
