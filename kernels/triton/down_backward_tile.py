"""One tile of down_backward: dh and a' of its rows, and what they add to the routing weights' gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from ..scaled import SMALLEST_GRADIENT
from .activations import activate, activate_ungated
from .gemm_common import GROUP, halves
from .scale_rows import quantized

SMALLEST = tl.constexpr(SMALLEST_GRADIENT)


@triton.jit
def _store_scaled(values, codes, scales, row, is_row, first_column, SIDE: tl.constexpr, I: tl.constexpr):
    """Quantize and store a group of dh as scaled.scale_halves does: of gates (SIDE 0), or of ups."""
    GROUPS: tl.constexpr = (I + GROUP - 1) // GROUP
    code, scale = quantized(values.to(tl.float32), SMALLEST, codes.dtype.element_ty)
    group = SIDE * GROUPS + first_column // GROUP
    offset = row * (2 * GROUPS * GROUP) + group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + offset, code, mask=is_row)
    tl.store(scales + row * (2 * GROUPS) + group, scale[:, None], mask=is_row)


@triton.jit
def _backward_piece(
    da,
    h,
    dh,
    a,
    codes,
    scales,
    routed,
    row,
    is_row,
    first_column,
    I: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NAME: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute and store dh and a' of some columns, and return what these columns add to <da, act(h)>. `da` is 0 where
    nothing is wanted that depends on it; INTERLEAVED is None where the activation has no gate."""
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
def backward_pieces(
    da,
    h,
    dh,
    a,
    codes,
    scales,
    routed,
    row,
    is_row,
    first_column,
    I: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NAME: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Run `_backward_piece` on PIECE columns at a time: whole tiles of da, h, dh and a do not fit in registers
    together."""
    if COLUMNS <= PIECE:
        dw = _backward_piece(
            da,
            h,
            dh,
            a,
            codes,
            scales,
            routed,
            row,
            is_row,
            first_column,
            I,
            INTERLEAVED,
            NAME,
            ALPHA,
            LIMIT,
            ROWS,
            COLUMNS,
        )
    else:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = halves(da, ROWS, COLUMNS)
        dw = backward_pieces(
            left,
            h,
            dh,
            a,
            codes,
            scales,
            routed,
            row,
            is_row,
            first_column,
            I,
            INTERLEAVED,
            NAME,
            ALPHA,
            LIMIT,
            ROWS,
            HALF,
            PIECE,
        )
        dw += backward_pieces(
            right,
            h,
            dh,
            a,
            codes,
            scales,
            routed,
            row,
            is_row,
            first_column + HALF,
            I,
            INTERLEAVED,
            NAME,
            ALPHA,
            LIMIT,
            ROWS,
            HALF,
            PIECE,
        )
    return dw
