"""up: h[r] = x[token[r]] @ gate_up[e]^T (+ bias[e]) and a[r] = act(h[r]), in one pass; h in the order of gate_up.

A tile has COLUMNS gates and as many ups; where the activation has no gate (INTERLEAVED is None) COLUMNS columns of h.
With FP8 products (../scaled.py) a is computed from h as it is stored, and COLUMNS of it are a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..interface import PackedOperand
from ..scaled import block_scales
from .config import as_e4m3
from .descriptors import gate_up_descriptor, weight_descriptor
from .gemm_common import (
    T_DEPENDENT,
    bias_strides,
    gemm_plan,
    language_dtype,
    lora_operands,
    precision,
    row_tile,
    scaled_output,
    swizzle,
    used_row_tiles,
)
from .gemm_packed import packed_up
from .launch import launch_kernel
from .up_tile import up_tile


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_up_kernel(
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
    tiles,
    num_row_tiles,
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
    RASTER: tl.constexpr,
    BLOCKS_OF_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute h and a of the tiles of a program. With x_scales x, weight and `codes`, in which a goes, are in FP8, h
    is of DTYPE."""
    if DESCRIBED:
        num_row_tiles = used_row_tiles(tiles, num_row_tiles)
        num_programs = num_row_tiles * tl.cdiv(I, COLUMNS)
        for program in range(tl.program_id(0), num_programs, tl.num_programs(0)):
            tile, column_tile = swizzle(program, num_row_tiles, tl.cdiv(I, COLUMNS), RASTER)
            expert, first, end = row_tile(tiles, tile, ROWS, BLOCKS_OF_TILE)
            up_tile(
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
                H,
                I,
                STRIDE_E,
                STRIDE_N,
                STRIDE_K,
                BIAS_STRIDE_E,
                BIAS_STRIDE_N,
                INTERLEAVED,
                J,
                FACTOR_STRIDE_E,
                FACTOR_STRIDE_N,
                FACTOR_STRIDE_J,
                NAME,
                ALPHA,
                LIMIT,
                DTYPE,
                DESCRIBED,
                ROWS,
                COLUMNS,
                DEPTH,
                PRECISION,
            )
    else:
        tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(I, COLUMNS), RASTER)
        expert, first, end = row_tile(tiles, tile, ROWS, BLOCKS_OF_TILE)
        if expert < 0:
            return
        up_tile(
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
            H,
            I,
            STRIDE_E,
            STRIDE_N,
            STRIDE_K,
            BIAS_STRIDE_E,
            BIAS_STRIDE_N,
            INTERLEAVED,
            J,
            FACTOR_STRIDE_E,
            FACTOR_STRIDE_N,
            FACTOR_STRIDE_J,
            NAME,
            ALPHA,
            LIMIT,
            DTYPE,
            DESCRIBED,
            ROWS,
            COLUMNS,
            DEPTH,
            PRECISION,
        )


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
            gemm_up_kernel,
            plan.grid(persistent=described),
            (
                x_TH,
                weight if described else gate_up_E2IH,
                bias_E2I,
                *lora_tensors,
                h_R2I,
                a_RI,
                rows.token,
                None,
                None,
                None,
                None,
                rows.tiles,
            ),
            (plan.row_tiles,),
            (
                hidden,
                inner,
                *gate_up_E2IH.stride(),
                *bias_strides(bias_E2I),
                interleaved if is_gated else None,
                *lora_constants,
                *activation,
                None,
                described,
                *plan.tile,
                precision(x_TH.dtype),
            ),
            **plan.options,
        )
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
            gemm_up_kernel,
            plan.grid(persistent=False),
            (
                as_e4m3(x.codes),
                as_e4m3(gate_up.codes),
                None,
                *lora_tensors,
                h_R2I,
                a_RI,
                rows.token,
                x.scales,
                block_scales(gate_up),
                codes,
                scales,
                rows.tiles,
            ),
            (plan.row_tiles,),
            (
                hidden,
                inner,
                *gate_up.codes.stride(),
                *bias_strides(None),
                False,
                *lora_constants,
                *activation,
                language_dtype(dtype),
                False,
                *plan.tile,
                precision(dtype),
            ),
            **plan.options,
        )
    return h_R2I, a_RI, a
