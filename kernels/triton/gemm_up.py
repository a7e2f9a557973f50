"""up: h[r] = x[token[r]] @ gate_up[e]^T (+ bias[e]) and a[r] = act(h[r]), in one pass; h in the order of gate_up.

A tile has COLUMNS gates and as many ups; where the activation has no gate (INTERLEAVED is None) COLUMNS columns of h.
With FP8 products (../scaled.py) a is computed from h as it is stored, and COLUMNS of it are a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..interface import PackedOperand
from ..scaled import SMALLEST, block_scales
from .activations import activate, activate_ungated
from .config import as_e4m3
from .descriptors import gate_up_descriptor, weight_descriptor
from .gemm_common import (
    GROUP,
    T_DEPENDENT,
    add_lora,
    bias_strides,
    described_product,
    gemm_plan,
    halves,
    language_dtype,
    lora_operands,
    pointer_product,
    precision,
    real_row_tiles,
    row_tile,
    scaled_output,
    scales_of,
    swizzle,
)
from .gemm_packed import packed_up
from .launch import launch_kernel
from .scale_rows import quantized

SMALLEST_VALUE = tl.constexpr(SMALLEST)


@triton.jit
def _up_tile(
    expert, first, end, column_tile, x, weight, bias, shrunk, factor, h, a, token, x_scales, weight_scales, codes, scales,
    H: tl.constexpr, I: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr, INTERLEAVED: tl.constexpr,
    J: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, ROWS)
    # past the end the last row again: were it always token 0's, all programs would wait for that one row
    source = tl.load(token + tl.minimum(row, end - 1)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    x_pointers = x + source[:, None] * H + depth[None, :]

    # The tile's weight rows: (gate, up) pairs side by side, unless that would break up contiguous loads.
    GATED: tl.constexpr = INTERLEAVED is not None
    SIDES: tl.constexpr = 2 if GATED else 1
    IN_ORDER: tl.constexpr = INTERLEAVED or not GATED
    place = tl.arange(0, SIDES * COLUMNS)
    PAIRED: tl.constexpr = INTERLEAVED or (STRIDE_N != 1 and not DESCRIBED)
    side = place % 2 if PAIRED else place // COLUMNS
    if IN_ORDER:
        weight_row = SIDES * column_tile * COLUMNS + place
        is_weight_row = weight_row < SIDES * I
    else:
        place_in_side = column_tile * COLUMNS + (place // 2 if PAIRED else place % COLUMNS)
        weight_row = place_in_side + side * I
        is_weight_row = place_in_side < I
    if DESCRIBED:
        first_column = (SIDES if IN_ORDER else 1) * column_tile * COLUMNS
        h_tile = described_product(
            x_pointers, 0, weight, expert, first_column, True, not IN_ORDER, STRIDE_K == 1,
            ROWS, SIDES * COLUMNS, H, DEPTH, PRECISION,
        )  # fmt: skip
    else:
        h_tile = pointer_product(
            x_pointers,
            weight + expert.to(tl.int64) * STRIDE_E + weight_row[None, :].to(tl.int64) * STRIDE_N
            + depth[:, None] * STRIDE_K,
            x_scales, source, weight_scales, (SIDES * expert + side) * tl.cdiv(I, GROUP) + column_tile,
            is_weight_row, 1, STRIDE_K, ROWS, SIDES * COLUMNS, H, DEPTH, PRECISION,
        )  # fmt: skip
    h_tile = add_lora(
        h_tile, shrunk, factor, expert, row, end, weight_row, is_weight_row,
        J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J, PRECISION,
    )  # fmt: skip
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
        if PAIRED:
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


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_up_kernel(
    x, weight, bias, shrunk, factor, h, a, token, x_scales, weight_scales, codes, scales, tiles, num_row_tiles,
    H: tl.constexpr, I: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr, INTERLEAVED: tl.constexpr,
    J: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RASTER: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """With x_scales x, weight and `codes`, in which a goes, are in FP8, h is of DTYPE."""
    if DESCRIBED:
        num_row_tiles = real_row_tiles(tiles, num_row_tiles)
        num_programs = num_row_tiles * tl.cdiv(I, COLUMNS)
        for program in range(tl.program_id(0), num_programs, tl.num_programs(0)):
            tile, column_tile = swizzle(program, num_row_tiles, tl.cdiv(I, COLUMNS), RASTER)
            expert, first, end = row_tile(tiles, tile, ROWS, PARTS)
            _up_tile(
                expert, first, end, column_tile, x, weight, bias, shrunk, factor, h, a, token,
                x_scales, weight_scales, codes, scales,
                H, I, STRIDE_E, STRIDE_N, STRIDE_K, BIAS_STRIDE_E, BIAS_STRIDE_N, INTERLEAVED,
                J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J,
                NAME, ALPHA, LIMIT, DTYPE, DESCRIBED, ROWS, COLUMNS, DEPTH, PRECISION,
            )  # fmt: skip
    else:
        tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(I, COLUMNS), RASTER)
        expert, first, end = row_tile(tiles, tile, ROWS, PARTS)
        if expert < 0:
            return
        _up_tile(
            expert, first, end, column_tile, x, weight, bias, shrunk, factor, h, a, token,
            x_scales, weight_scales, codes, scales,
            H, I, STRIDE_E, STRIDE_N, STRIDE_K, BIAS_STRIDE_E, BIAS_STRIDE_N, INTERLEAVED,
            J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J,
            NAME, ALPHA, LIMIT, DTYPE, DESCRIBED, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip


def up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, lora=None):
    if isinstance(gate_up_E2IH, PackedOperand):
        return packed_up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, lora)
    num_rows, (_, width, hidden) = rows.token.numel(), gate_up_E2IH.shape
    is_gated, inner = activation.is_gated, activation.inner(width)
    h_R2I = x_TH.new_empty(num_rows, width) if want_h else None
    a_RI = x_TH.new_empty(num_rows, inner) if want_a else None
    if num_rows:
        plan = gemm_plan("up" if is_gated else "up_ungated", x_TH, gate_up_E2IH, rows, inner)
        weight = None
        if plan.blocks.descriptors and is_gated:
            weight = gate_up_descriptor(gate_up_E2IH, plan.blocks.columns, plan.blocks.depth, interleaved)
        elif plan.blocks.descriptors:
            weight = weight_descriptor(gate_up_E2IH, plan.blocks.columns, plan.blocks.depth)
        described = weight is not None
        lora_tensors, lora_constants = lora_operands(lora)
        launch_kernel(
            gemm_up_kernel, plan.grid(persistent=described),
            (x_TH, weight if described else gate_up_E2IH, bias_E2I, *lora_tensors, h_R2I, a_RI, rows.token,
             None, None, None, None, rows.tiles),
            (plan.row_tiles,),
            (hidden, inner, *gate_up_E2IH.stride(), *bias_strides(bias_E2I), interleaved if is_gated else None,
             *lora_constants, *activation, None, described, *plan.tile, precision(x_TH.dtype)),
            **plan.options,
        )  # fmt: skip
    return h_R2I, a_RI


def scaled_up(x, gate_up, rows, activation, dtype, want_h, want_a, want_scaled, lora=None):
    num_rows, (_, width, hidden) = rows.token.numel(), gate_up.codes.shape
    inner = activation.inner(width)
    h_R2I = x.scales.new_empty(num_rows, width, dtype=dtype) if want_h else None
    a_RI = x.scales.new_empty(num_rows, inner, dtype=dtype) if want_a else None
    a, codes, scales = scaled_output(want_scaled, x, num_rows, inner)
    if num_rows:
        plan = gemm_plan("up", x.codes, gate_up.codes, rows, inner)
        lora_tensors, lora_constants = lora_operands(lora)
        launch_kernel(
            gemm_up_kernel, plan.grid(persistent=False),
            (as_e4m3(x.codes), as_e4m3(gate_up.codes), None, *lora_tensors, h_R2I, a_RI, rows.token, x.scales,
             block_scales(gate_up), codes, scales, rows.tiles),
            (plan.row_tiles,),
            (hidden, inner, *gate_up.codes.stride(), *bias_strides(None), False, *lora_constants, *activation,
             language_dtype(dtype), False, *plan.tile, precision(dtype)),
            **plan.options,
        )  # fmt: skip
    return h_R2I, a_RI, a
