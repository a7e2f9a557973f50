"""One tile of up: h of its rows and a = act(h)."""

from __future__ import annotations

import triton
import triton.language as tl

from ..scaled import SMALLEST
from .activations import activate, activate_ungated
from .gemm_common import GROUP, add_lora, described_product, halves, pointer_product, scales_of
from .scale_rows import quantized

SMALLEST_VALUE = tl.constexpr(SMALLEST)


@triton.jit
def up_tile(
    expert,
    first,
    end,
    column_tile,
    x,
    weight,
    bias,
    shrunk,
    factor,
    h,
    a,
    token,
    x_scales,
    weight_scales,
    codes,
    scales,
    H: tl.constexpr,
    I: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr,
    BIAS_STRIDE_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    J: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_N: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr,
    NAME: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    DTYPE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute h and a of one tile, and store those that are not None; in FP8 (x_scales is not None) codes and scales of
    a.

    A tile has SIDES * COLUMNS rows of the weight: COLUMNS gates and as many ups, or COLUMNS rows without a gate.
    IN_ORDER: these rows are neighbours in the weight. SIDE_BY_SIDE: in the tile each gate stands beside its up, unless
    that would break up contiguous loads; otherwise all gates come first.
    """
    row = first + tl.arange(0, ROWS)
    # past the end the last row again: were it always token 0's, all programs would wait for that one row
    source = tl.load(token + tl.minimum(row, end - 1)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    x_pointers = x + source[:, None] * H + depth[None, :]

    GATED: tl.constexpr = INTERLEAVED is not None
    SIDES: tl.constexpr = 2 if GATED else 1
    IN_ORDER: tl.constexpr = INTERLEAVED or not GATED
    tile_row = tl.arange(0, SIDES * COLUMNS)
    SIDE_BY_SIDE: tl.constexpr = INTERLEAVED or (STRIDE_N != 1 and not DESCRIBED)
    side = tile_row % 2 if SIDE_BY_SIDE else tile_row // COLUMNS
    if IN_ORDER:
        weight_row = SIDES * column_tile * COLUMNS + tile_row
        is_weight_row = weight_row < SIDES * I
    else:
        column_of_side = column_tile * COLUMNS + (tile_row // 2 if SIDE_BY_SIDE else tile_row % COLUMNS)
        weight_row = column_of_side + side * I
        is_weight_row = column_of_side < I
    if DESCRIBED:
        first_column = (SIDES if IN_ORDER else 1) * column_tile * COLUMNS
        h_tile = described_product(
            x_pointers,
            0,
            weight,
            expert,
            first_column,
            True,
            not IN_ORDER,
            STRIDE_K == 1,
            ROWS,
            SIDES * COLUMNS,
            H,
            DEPTH,
            PRECISION,
        )
    else:
        h_tile = pointer_product(
            x_pointers,
            weight
            + expert.to(tl.int64) * STRIDE_E
            + weight_row[None, :].to(tl.int64) * STRIDE_N
            + depth[:, None] * STRIDE_K,
            x_scales,
            source,
            weight_scales,
            (SIDES * expert + side) * tl.cdiv(I, GROUP) + column_tile,
            is_weight_row,
            1,
            STRIDE_K,
            ROWS,
            SIDES * COLUMNS,
            H,
            DEPTH,
            PRECISION,
        )
    h_tile = add_lora(
        h_tile,
        shrunk,
        factor,
        expert,
        row,
        end,
        weight_row,
        is_weight_row,
        J,
        FACTOR_STRIDE_E,
        FACTOR_STRIDE_N,
        FACTOR_STRIDE_J,
        PRECISION,
    )
    if bias is not None:
        bias_row = bias + expert.to(tl.int64) * BIAS_STRIDE_E + weight_row * BIAS_STRIDE_N
        h_tile += tl.load(bias_row, mask=is_weight_row, other=0.0).to(tl.float32)[None, :]

    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row = (row < end)[:, None]
    is_stored = is_row & (column < I)[None, :]
    long_row = row.to(tl.int64)[:, None]
    if DTYPE is not None:
        h_tile = h_tile.to(DTYPE).to(tl.float32)
    if GATED:
        if SIDE_BY_SIDE:
            gate, up = tl.split(tl.reshape(h_tile, (ROWS, COLUMNS, 2)))
        else:
            gate, up = halves(h_tile, ROWS, 2 * COLUMNS)
    if h is not None:
        if IN_ORDER:
            h_pointers = h + long_row * (SIDES * I) + weight_row[None, :]
            tl.store(h_pointers, h_tile.to(h.dtype.element_ty), mask=is_row & is_weight_row[None, :])
        else:
            h_pointers = h + long_row * (2 * I) + column[None, :]
            tl.store(h_pointers, gate.to(h.dtype.element_ty), mask=is_stored)
            tl.store(h_pointers + I, up.to(h.dtype.element_ty), mask=is_stored)
    if a is not None or codes is not None:
        if GATED:
            activated, _, _ = activate(gate, up, 1.0, NAME, ALPHA, LIMIT)
        else:
            activated, _ = activate_ungated(h_tile, 1.0, NAME)
    if a is not None:
        tl.store(a + long_row * I + column[None, :], activated.to(a.dtype.element_ty), mask=is_stored)
    if codes is not None:
        code, scale = quantized(activated, SMALLEST_VALUE, codes.dtype.element_ty)
        tl.store(codes + long_row * I + column[None, :], code, mask=is_stored)
        tl.store(scales_of(scales, row, I) + column_tile, scale, mask=row < end)
