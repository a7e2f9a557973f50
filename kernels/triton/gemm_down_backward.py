"""down_backward: da' = dout W2 (+ dv A2), and from one read of h: dh, a' and the gradient of the routing weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed.fp8 import FP8_BLOCK
from ..scaled import SMALLEST_GRADIENT, block_scales
from .activations import activate, activate_ungated
from .config import as_e4m3, max_row_tiles, tile_rows
from .descriptors import weight_descriptor
from .gemm_common import (
    GROUP,
    T_DEPENDENT,
    add_lora,
    bias_strides,
    described_product,
    gemm_plan,
    halves,
    lora_operands,
    pointer_product,
    precision,
    row_tile,
    scaled_output,
    swizzle,
)
from .launch import cdiv, launch_kernel
from .scale_rows import quantized

SMALLEST = tl.constexpr(SMALLEST_GRADIENT)


@triton.jit
def _store_scaled(values, codes, scales, row, is_row, first_column, SIDE: tl.constexpr, I: tl.constexpr):
    """A group of dh in FP8 as scaled.scale_halves has it: of gates (SIDE 0), or of ups."""
    GROUPS: tl.constexpr = (I + GROUP - 1) // GROUP
    code, scale = quantized(values.to(tl.float32), SMALLEST, codes.dtype.element_ty)
    group = SIDE * GROUPS + first_column // GROUP
    place = row * (2 * GROUPS * GROUP) + group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + place, code, mask=is_row)
    tl.store(scales + row * (2 * GROUPS) + group, scale[:, None], mask=is_row)


@triton.jit
def _backward_piece(
    da, h, dh, a, codes, scales, routed, row, is_row, first_column,
    I: tl.constexpr, INTERLEAVED: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dh and a of some columns, stored; returns these columns' part of <da, act(h)> (`da` is 0 where not wanted).
    INTERLEAVED is None where the activation has no gate."""
    column = first_column + tl.arange(0, COLUMNS)
    is_stored = is_row & (column < I)[None, :]
    GATED: tl.constexpr = INTERLEAVED is not None
    h_start = row * (2 * I if GATED else I)
    if not GATED:
        h_tile = tl.load(h + h_start + column[None, :], mask=is_stored, other=0.0)
        activated, dh_tile = activate_ungated(h_tile.to(tl.float32), routed * da, NAME)
    elif INTERLEAVED:
        wide = 2 * first_column + tl.arange(0, 2 * COLUMNS)
        is_wide = is_row & (wide < 2 * I)[None, :]
        h_tile = tl.load(h + h_start + wide[None, :], mask=is_wide, other=0.0)
        gate, up = tl.split(tl.reshape(h_tile, (ROWS, COLUMNS, 2)))
    else:
        gate = tl.load(h + h_start + column[None, :], mask=is_stored, other=0.0)
        up = tl.load(h + h_start + column[None, :] + I, mask=is_stored, other=0.0)
    if GATED:
        activated, dgate, dup = activate(gate.to(tl.float32), up.to(tl.float32), routed * da, NAME, ALPHA, LIMIT)
        dgate = dgate.to(h.dtype.element_ty)
        dup = dup.to(h.dtype.element_ty)
    if a is not None:
        tl.store(a + row * I + column[None, :], (routed * activated).to(a.dtype.element_ty), mask=is_stored)
    if dh is not None and not GATED:
        tl.store(dh + h_start + column[None, :], dh_tile.to(dh.dtype.element_ty), mask=is_stored)
    elif dh is not None:
        if INTERLEAVED:
            joined = tl.reshape(tl.join(dgate, dup), (ROWS, 2 * COLUMNS))
            tl.store(dh + h_start + wide[None, :], joined, mask=is_wide)
        else:
            tl.store(dh + h_start + column[None, :], dgate, mask=is_stored)
            tl.store(dh + h_start + column[None, :] + I, dup, mask=is_stored)
    if codes is not None:
        _store_scaled(dgate, codes, scales, row, is_row, first_column, 0, I)
        _store_scaled(dup, codes, scales, row, is_row, first_column, 1, I)
    return tl.sum(da * activated, axis=1)


@triton.jit
def _backward_pieces(
    da, h, dh, a, codes, scales, routed, row, is_row, first_column,
    I: tl.constexpr, INTERLEAVED: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """`_backward_piece` on PIECE columns at a time: whole tiles of da, h, dh and a do not fit in registers together."""
    if COLUMNS <= PIECE:
        dw = _backward_piece(
            da, h, dh, a, codes, scales, routed, row, is_row, first_column,
            I, INTERLEAVED, NAME, ALPHA, LIMIT, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = halves(da, ROWS, COLUMNS)
        dw = _backward_pieces(
            left, h, dh, a, codes, scales, routed, row, is_row, first_column,
            I, INTERLEAVED, NAME, ALPHA, LIMIT, ROWS, HALF, PIECE,
        )  # fmt: skip
        dw += _backward_pieces(
            right, h, dh, a, codes, scales, routed, row, is_row, first_column + HALF,
            I, INTERLEAVED, NAME, ALPHA, LIMIT, ROWS, HALF, PIECE,
        )  # fmt: skip
    return dw


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_down_backward_kernel(
    dout, weight, shrunk, factor, h, routing_weight, dh, a, dw_parts, token, pair, dout_scales, weight_scales, codes,
    scales, tiles, num_row_tiles, num_rows,
    H: tl.constexpr, I: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_I: tl.constexpr,
    J: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr,
    INTERLEAVED: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RASTER: tl.constexpr, PARTS: tl.constexpr,
    PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With dout_scales dout, weight and `codes`, in which dh goes, are in FP8; a piece is a group then."""
    tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(I, COLUMNS), RASTER)
    expert, first, end = row_tile(tiles, tile, ROWS, PARTS)
    if expert < 0:
        return
    row = first + tl.arange(0, ROWS)
    is_row = row < end
    first_column = column_tile * COLUMNS
    if dh is not None or dw_parts is not None or codes is not None:
        source = tl.load(token + tl.minimum(row, end - 1)).to(tl.int64)  # past the end: as in up
        column = first_column + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        dout_pointers = dout + source[:, None] * H + depth[None, :]
        if DESCRIBED:
            da = described_product(
                dout_pointers, 0, weight, expert, first_column, True, False, STRIDE_H == 1,
                ROWS, COLUMNS, H, DEPTH, PRECISION,
            )  # fmt: skip
        else:
            da = pointer_product(
                dout_pointers,
                weight + expert.to(tl.int64) * STRIDE_E + column[None, :].to(tl.int64) * STRIDE_I
                + depth[:, None] * STRIDE_H,
                dout_scales, source,
                weight_scales, expert * tl.cdiv(I, GROUP) + tl.minimum(column, I - 1) // GROUP,
                column < I, 1, STRIDE_H, ROWS, COLUMNS, H, DEPTH, PRECISION,
            )  # fmt: skip
        da = add_lora(
            da, shrunk, factor, expert, row, end, column, column < I,
            J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J, PRECISION,
        )  # fmt: skip
    else:
        da = tl.zeros((ROWS, COLUMNS), tl.float32)

    routed = tl.load(routing_weight + tl.load(pair + row, mask=is_row, other=0), mask=is_row, other=0.0)[:, None]
    dw = _backward_pieces(
        da, h, dh, a, codes, scales, routed, row.to(tl.int64)[:, None], is_row[:, None], first_column,
        I, INTERLEAVED, NAME, ALPHA, LIMIT, ROWS, COLUMNS, PIECE,
    )  # fmt: skip
    if dw_parts is not None:
        tl.store(dw_parts + column_tile.to(tl.int64) * num_rows + row, dw, mask=is_row)


@triton.jit(do_not_specialize=T_DEPENDENT)
def routing_gradient_kernel(
    dw_parts, dout, bias, dw, token, pair, tiles, num_rows,
    H: tl.constexpr, BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_H: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """dw of a row: the parts of its column tiles in their order, + <dout, bias of its expert>."""
    tile = tl.program_id(0)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tiles + tile * 3 + 2)
    total = tl.zeros((ROWS,), tl.float32)
    for part in range(PARTS):
        total += tl.load(dw_parts + tl.cast(part, tl.int64) * num_rows + row, mask=is_row, other=0.0)
    if bias is not None:
        source = tl.load(token + row, mask=is_row, other=0).to(tl.int64)[:, None]
        products = tl.zeros((ROWS, DEPTH), tl.float32)
        for start in range(0, H, DEPTH):
            place = start + tl.arange(0, DEPTH)
            bias_row = tl.load(bias + expert * BIAS_STRIDE_E + place * BIAS_STRIDE_H, mask=place < H, other=0.0)
            gradient = tl.load(dout + source * H + place[None, :], mask=(place < H)[None, :], other=0.0)
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
    parts = None
    if num_rows:
        plan = gemm_plan("down_backward", dout_TH, down_EHI, rows, inner)
        parts = weight_P.new_empty(plan.column_tiles, num_rows) if want_dw else None
        weight = None
        if plan.blocks.descriptors:
            weight = weight_descriptor(down_EHI.transpose(1, 2), plan.blocks.columns, plan.blocks.depth)
        described = weight is not None
        lora_tensors, lora_constants = lora_operands(lora)
        launch_kernel(
            gemm_down_backward_kernel, plan.grid(persistent=False),
            (dout_TH, weight if described else down_EHI, *lora_tensors, h_R2I, weight_P, dh_R2I, a_RI, parts,
             rows.token, rows.pair, None, None, None, None, rows.tiles),
            (plan.row_tiles, num_rows),
            (hidden, inner, *down_EHI.stride(), *lora_constants, order, *activation, described, *plan.tile,
             plan.blocks.piece if order is False else plan.blocks.piece // 2, precision(dout_TH.dtype)),
            **plan.options,
        )  # fmt: skip
    if not want_dw:
        return dh_R2I, a_RI, None
    return dh_R2I, a_RI, weight_P.new_zeros(0) if parts is None else routing_gradient(parts, dout_TH, bias_EH, rows)


def scaled_down_backward(
    dout, down, h_R2I, weight_P, rows, activation, want_dh, want_a, want_dw, want_scaled, lora=None
):
    num_rows, (_, inner, hidden) = rows.token.numel(), down.codes.shape
    groups = cdiv(inner, FP8_BLOCK)
    dh_R2I = torch.empty_like(h_R2I) if want_dh else None
    a_RI = h_R2I.new_empty(num_rows, inner) if want_a else None
    parts = weight_P.new_empty(groups, num_rows) if want_dw else None
    dh, codes, scales = scaled_output(want_scaled, dout, num_rows, 2 * groups * FP8_BLOCK)
    if num_rows:
        plan = gemm_plan("down_backward", dout.codes, down.codes, rows, inner)
        lora_tensors, lora_constants = lora_operands(lora)
        launch_kernel(
            gemm_down_backward_kernel, plan.grid(persistent=False),
            (as_e4m3(dout.codes), as_e4m3(down.codes), *lora_tensors, h_R2I, weight_P, dh_R2I, a_RI, parts, rows.token,
             rows.pair, dout.scales, block_scales(down), codes, scales, rows.tiles),
            (plan.row_tiles, num_rows),
            (hidden, inner, *down.codes.transpose(1, 2).stride(), *lora_constants, False, *activation, False,
             *plan.tile, plan.blocks.columns, precision(h_R2I.dtype)),
            **plan.options,
        )  # fmt: skip
    return dh_R2I, a_RI, routing_gradient(parts, h_R2I, None, rows) if want_dw else None, dh


def routing_gradient(parts, dout_TH, bias_EH, rows):
    """dw [P]: the parts [column tiles, P] of every row summed in their order, + <dout, bias>; zero for dropped pairs."""
    column_tiles, num_rows = parts.shape
    dw_P = parts.new_zeros(num_rows)
    if num_rows:
        num_experts = rows.offsets.shape[0] - 1
        launch_kernel(
            routing_gradient_kernel,
            (max_row_tiles(num_rows, num_experts),),
            (parts, dout_TH, bias_EH, dw_P, rows.token, rows.pair, rows.tiles),
            (num_rows,),
            (dout_TH.shape[1], *bias_strides(bias_EH), column_tiles, tile_rows(num_rows, num_experts), 64),
            num_warps=4,
        )
    return dw_P
