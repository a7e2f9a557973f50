"""down and up_backward_input: out[r] = source[r] @ weight[e]^T (+ bias[e]), rows sorted by expert."""

from __future__ import annotations

import triton
import triton.language as tl

from ..interface import PackedOperand
from ..scaled import block_scales
from .config import as_e4m3
from .descriptors import row_descriptor, weight_descriptor
from .gemm_common import (
    GROUP,
    T_DEPENDENT,
    add_lora,
    bias_strides,
    described_product,
    gemm_plan,
    lora_operands,
    pointer_product,
    precision,
    row_tile,
    swizzle,
    used_row_tiles,
)
from .gemm_packed import packed_down
from .launch import launch_kernel


@triton.jit
def _down_tile(
    expert,
    first,
    end,
    column_tile,
    source,
    weight,
    bias,
    shrunk,
    factor,
    out,
    source_scales,
    weight_scales,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr,
    BIAS_STRIDE_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
    J: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_N: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    if DESCRIBED:
        product = described_product(
            source,
            first,
            weight,
            expert,
            column_tile * COLUMNS,
            False,
            False,
            STRIDE_K == 1,
            ROWS,
            COLUMNS,
            K,
            DEPTH,
            PRECISION,
        )
    else:
        depth = tl.arange(0, DEPTH)
        source_row = tl.minimum(row, end - 1)
        product = pointer_product(
            source + source_row.to(tl.int64)[:, None] * K + depth[None, :],
            weight
            + expert.to(tl.int64) * STRIDE_E
            + column[None, :].to(tl.int64) * STRIDE_N
            + depth[:, None] * STRIDE_K,
            source_scales,
            source_row,
            weight_scales,
            expert * tl.cdiv(N, GROUP) + tl.minimum(column, N - 1) // GROUP,
            column < N,
            1,
            STRIDE_K,
            ROWS,
            COLUMNS,
            K,
            DEPTH,
            PRECISION,
        )
    product = add_lora(
        product,
        shrunk,
        factor,
        expert,
        row,
        end,
        column,
        column < N,
        J,
        FACTOR_STRIDE_E,
        FACTOR_STRIDE_N,
        FACTOR_STRIDE_J,
        PRECISION,
    )
    if bias is not None:
        bias_column = bias + expert.to(tl.int64) * BIAS_STRIDE_E + column * BIAS_STRIDE_N
        product += tl.load(bias_column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * N + column[None, :],
        product.to(out.dtype.element_ty),
        mask=(row < end)[:, None] & (column < N)[None, :],
    )


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_down_kernel(
    source,
    weight,
    bias,
    shrunk,
    factor,
    out,
    source_scales,
    weight_scales,
    tiles,
    num_row_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr,
    BIAS_STRIDE_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
    J: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_N: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RASTER: tl.constexpr,
    BLOCKS_OF_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out[r] = source[r] @ weight[e]^T (+ shrunk[r] @ factor[e]^T) (+ bias[e]), weight [E, N, K], factor [E,
    N, J]. With scales source and weight are in FP8."""
    if DESCRIBED:
        num_row_tiles = used_row_tiles(tiles, num_row_tiles)
        num_programs = num_row_tiles * tl.cdiv(N, COLUMNS)
        # flattened, the next tile's loads are under way while this one is stored; an adapter's part is not in that loop
        FLATTEN: tl.constexpr = shrunk is None
        for program in tl.range(tl.program_id(0), num_programs, tl.num_programs(0), flatten=FLATTEN):
            tile, column_tile = swizzle(program, num_row_tiles, tl.cdiv(N, COLUMNS), RASTER)
            expert, first, end = row_tile(tiles, tile, ROWS, BLOCKS_OF_TILE)
            _down_tile(
                expert,
                first,
                end,
                column_tile,
                source,
                weight,
                bias,
                shrunk,
                factor,
                out,
                source_scales,
                weight_scales,
                N,
                K,
                STRIDE_E,
                STRIDE_N,
                STRIDE_K,
                BIAS_STRIDE_E,
                BIAS_STRIDE_N,
                DESCRIBED,
                J,
                FACTOR_STRIDE_E,
                FACTOR_STRIDE_N,
                FACTOR_STRIDE_J,
                ROWS,
                COLUMNS,
                DEPTH,
                PRECISION,
            )
    else:
        tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(N, COLUMNS), RASTER)
        expert, first, end = row_tile(tiles, tile, ROWS, BLOCKS_OF_TILE)
        if expert < 0:
            return
        _down_tile(
            expert,
            first,
            end,
            column_tile,
            source,
            weight,
            bias,
            shrunk,
            factor,
            out,
            source_scales,
            weight_scales,
            N,
            K,
            STRIDE_E,
            STRIDE_N,
            STRIDE_K,
            BIAS_STRIDE_E,
            BIAS_STRIDE_N,
            DESCRIBED,
            J,
            FACTOR_STRIDE_E,
            FACTOR_STRIDE_N,
            FACTOR_STRIDE_J,
            ROWS,
            COLUMNS,
            DEPTH,
            PRECISION,
        )


def _product(kernel, source_RK, weight_ENK, bias_EN, rows, lora, dtype=None, scales=(None, None)):
    """Multiply the rows of `source` by their experts' weights; dtype: of the product, if that is not the operands'."""
    num_rows, (_, columns, length) = rows.token.numel(), weight_ENK.shape
    out_RN = source_RK.new_empty(num_rows, columns, dtype=dtype)
    if num_rows:
        plan = gemm_plan(kernel, source_RK, weight_ENK, rows, columns)
        operands = None, None
        if plan.blocks.descriptors:
            tile_columns, depth = plan.blocks.columns, plan.blocks.depth
            operands = row_descriptor(source_RK, plan.rows, depth), weight_descriptor(weight_ENK, tile_columns, depth)
        described = None not in operands
        lora_tensors, lora_constants = lora_operands(lora)
        launch_kernel(
            gemm_down_kernel,
            plan.grid(persistent=described),
            (
                *(operands if described else (source_RK, weight_ENK)),
                bias_EN,
                *lora_tensors,
                out_RN,
                *scales,
                rows.tiles,
            ),
            (plan.row_tiles,),
            (
                columns,
                length,
                *weight_ENK.stride(),
                *bias_strides(bias_EN),
                described,
                *lora_constants,
                *plan.tile,
                precision(out_RN.dtype),
            ),
            **plan.options,
        )
    return out_RN


def down(a_RI, down_EHI, bias_EH, rows, lora=None):
    if isinstance(down_EHI, PackedOperand):
        return packed_down(a_RI, down_EHI, bias_EH, rows, lora)
    return _product("down", a_RI, down_EHI, bias_EH, rows, lora)


def up_backward_input(dh_R2I, gate_up_E2IH, rows, lora=None):
    return _product("up_backward_input", dh_R2I, gate_up_E2IH.transpose(1, 2), None, rows, lora)


def scaled_down(a, down, rows, dtype, lora=None):
    codes = as_e4m3(a.codes), as_e4m3(down.codes)
    return _product("down", *codes, None, rows, lora, dtype, (a.scales, block_scales(down)))
