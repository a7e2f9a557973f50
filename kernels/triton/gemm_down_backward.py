"""down_backward: da' = dout W2 (+ dv A2), and from one read of h: dh, a' and the gradient of the routing weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed.fp8 import FP8_BLOCK
from ..scaled import block_scales
from .config import as_e4m3, max_row_tiles, tile_rows
from .descriptors import weight_descriptor
from .down_backward_tile import backward_pieces
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
    scaled_output,
    swizzle,
)
from .launch import cdiv, launch_kernel


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_down_backward_kernel(
    dout,
    weight,
    shrunk,
    factor,
    h,
    routing_weight,
    dh,
    a,
    dw_partials,
    token,
    pair,
    dout_scales,
    weight_scales,
    codes,
    scales,
    tiles,
    num_row_tiles,
    num_rows,
    H: tl.constexpr,
    I: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_I: tl.constexpr,
    J: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_N: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NAME: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RASTER: tl.constexpr,
    BLOCKS_OF_TILE: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dh, a' and partial sums of dw of a tile. With dout_scales dout, weight and `codes`, in which dh goes, are
    in FP8; a piece is a group then."""
    tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(I, COLUMNS), RASTER)
    expert, first, end = row_tile(tiles, tile, ROWS, BLOCKS_OF_TILE)
    if expert < 0:
        return
    row = first + tl.arange(0, ROWS)
    is_row = row < end
    first_column = column_tile * COLUMNS
    if dh is not None or dw_partials is not None or codes is not None:
        source = tl.load(token + tl.minimum(row, end - 1)).to(tl.int64)  # past the end: as in up
        column = first_column + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        dout_pointers = dout + source[:, None] * H + depth[None, :]
        if DESCRIBED:
            da = described_product(
                dout_pointers,
                0,
                weight,
                expert,
                first_column,
                True,
                False,
                STRIDE_H == 1,
                ROWS,
                COLUMNS,
                H,
                DEPTH,
                PRECISION,
            )
        else:
            da = pointer_product(
                dout_pointers,
                weight
                + expert.to(tl.int64) * STRIDE_E
                + column[None, :].to(tl.int64) * STRIDE_I
                + depth[:, None] * STRIDE_H,
                dout_scales,
                source,
                weight_scales,
                expert * tl.cdiv(I, GROUP) + tl.minimum(column, I - 1) // GROUP,
                column < I,
                1,
                STRIDE_H,
                ROWS,
                COLUMNS,
                H,
                DEPTH,
                PRECISION,
            )
        da = add_lora(
            da,
            shrunk,
            factor,
            expert,
            row,
            end,
            column,
            column < I,
            J,
            FACTOR_STRIDE_E,
            FACTOR_STRIDE_N,
            FACTOR_STRIDE_J,
            PRECISION,
        )
    else:
        da = tl.zeros((ROWS, COLUMNS), tl.float32)

    routed = tl.load(routing_weight + tl.load(pair + row, mask=is_row, other=0), mask=is_row, other=0.0)[:, None]
    dw = backward_pieces(
        da,
        h,
        dh,
        a,
        codes,
        scales,
        routed,
        row.to(tl.int64)[:, None],
        is_row[:, None],
        first_column,
        I,
        INTERLEAVED,
        NAME,
        ALPHA,
        LIMIT,
        ROWS,
        COLUMNS,
        PIECE,
    )
    if dw_partials is not None:
        tl.store(dw_partials + column_tile.to(tl.int64) * num_rows + row, dw, mask=is_row)


@triton.jit(do_not_specialize=T_DEPENDENT)
def routing_gradient_kernel(
    dw_partials,
    dout,
    bias,
    dw,
    token,
    pair,
    tiles,
    num_rows,
    H: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr,
    BIAS_STRIDE_H: tl.constexpr,
    PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute dw of a row: the partial sums of its column tiles in their order, + <dout, bias of its expert>."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tiles + tile * 3 + 2)
    total = tl.zeros((ROWS,), tl.float32)
    for column_tile in range(PARTIALS):
        total += tl.load(dw_partials + tl.cast(column_tile, tl.int64) * num_rows + row, mask=is_row, other=0.0)
    if bias is not None:
        source = tl.load(token + row, mask=is_row, other=0).to(tl.int64)[:, None]
        products = tl.zeros((ROWS, DEPTH), tl.float32)
        for start in range(0, H, DEPTH):
            column = start + tl.arange(0, DEPTH)
            bias_row = tl.load(bias + expert * BIAS_STRIDE_E + column * BIAS_STRIDE_H, mask=column < H, other=0.0)
            gradient = tl.load(dout + source * H + column[None, :], mask=(column < H)[None, :], other=0.0)
            products += gradient.to(tl.float32) * bias_row.to(tl.float32)[None, :]
        total += tl.sum(products, axis=1)
    tl.store(dw + tl.load(pair + row, mask=is_row, other=0), total, mask=is_row)


def down_backward(
    dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw, lora=None
):
    num_rows, (_, hidden, inner) = rows.token.numel(), down_EHI.shape
    order = bool(interleaved) if activation.is_gated else None
    dh_R2I = dout_TH.new_empty(num_rows, activation.width(inner)) if want_dh else None
    a_RI = dout_TH.new_empty(num_rows, inner) if want_a else None
    partials = None
    if num_rows:
        plan = gemm_plan("down_backward", dout_TH, down_EHI, rows, inner)
        partials = weight_P.new_empty(plan.column_tiles, num_rows) if want_dw else None
        weight = None
        if plan.blocks.descriptors:
            weight = weight_descriptor(down_EHI.transpose(1, 2), plan.blocks.columns, plan.blocks.depth)
        described = weight is not None
        lora_tensors, lora_constants = lora_operands(lora)
        launch_kernel(
            gemm_down_backward_kernel,
            plan.grid(persistent=False),
            (
                dout_TH,
                weight if described else down_EHI,
                *lora_tensors,
                h_R2I,
                weight_P,
                dh_R2I,
                a_RI,
                partials,
                rows.token,
                rows.pair,
                None,
                None,
                None,
                None,
                rows.tiles,
            ),
            (plan.row_tiles, num_rows),
            (
                hidden,
                inner,
                *down_EHI.stride(),
                *lora_constants,
                order,
                *activation,
                described,
                *plan.tile,
                plan.blocks.piece if order is False else plan.blocks.piece // 2,
                precision(dout_TH.dtype),
            ),
            **plan.options,
        )
    if not want_dw:
        return dh_R2I, a_RI, None
    return (
        dh_R2I,
        a_RI,
        weight_P.new_zeros(0) if partials is None else routing_gradient(partials, dout_TH, bias_EH, rows),
    )


def scaled_down_backward(
    dout, down, h_R2I, weight_P, rows, activation, want_dh, want_a, want_dw, want_scaled, lora=None
):
    num_rows, (_, inner, hidden) = rows.token.numel(), down.codes.shape
    groups = cdiv(inner, FP8_BLOCK)
    dh_R2I = torch.empty_like(h_R2I) if want_dh else None
    a_RI = h_R2I.new_empty(num_rows, inner) if want_a else None
    partials = weight_P.new_empty(groups, num_rows) if want_dw else None
    dh, codes, scales = scaled_output(want_scaled, dout, num_rows, 2 * groups * FP8_BLOCK)
    if num_rows:
        plan = gemm_plan("down_backward", dout.codes, down.codes, rows, inner)
        lora_tensors, lora_constants = lora_operands(lora)
        launch_kernel(
            gemm_down_backward_kernel,
            plan.grid(persistent=False),
            (
                as_e4m3(dout.codes),
                as_e4m3(down.codes),
                *lora_tensors,
                h_R2I,
                weight_P,
                dh_R2I,
                a_RI,
                partials,
                rows.token,
                rows.pair,
                dout.scales,
                block_scales(down),
                codes,
                scales,
                rows.tiles,
            ),
            (plan.row_tiles, num_rows),
            (
                hidden,
                inner,
                *down.codes.transpose(1, 2).stride(),
                *lora_constants,
                False,
                *activation,
                False,
                *plan.tile,
                plan.blocks.columns,
                precision(h_R2I.dtype),
            ),
            **plan.options,
        )
    return dh_R2I, a_RI, routing_gradient(partials, h_R2I, None, rows) if want_dw else None, dh


def routing_gradient(partials, dout_TH, bias_EH, rows):
    """Compute dw [P]: the partial sums [column tiles, P] of every row added in their order, + <dout, bias>; zero for
    dropped pairs."""
    column_tiles, num_rows = partials.shape
    dw_P = partials.new_zeros(num_rows)
    if num_rows:
        num_experts = rows.offsets.shape[0] - 1
        launch_kernel(
            routing_gradient_kernel,
            (max_row_tiles(num_rows, num_experts),),
            (partials, dout_TH, bias_EH, dw_P, rows.token, rows.pair, rows.tiles),
            (num_rows,),
            (dout_TH.shape[1], *bias_strides(bias_EH), column_tiles, tile_rows(num_rows, num_experts), 64),
            num_warps=4,
        )
    return dw_P
