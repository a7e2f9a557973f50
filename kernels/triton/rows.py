"""Grouped GEMMs whose rows are sorted by expert: up, down, down_backward, input_rows.

One program computes one tile of the tile table times one tile of columns. Rows past an expert's end are computed from
whatever lies there, never stored, and touch no other row. Weight columns past the end are read as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import blocks_for, max_row_tiles, tile_rows
from .common import activate, swizzle
from .launch import cdiv, launch

T_DEPENDENT = ["num_row_tiles", "num_rows"]


@triton.jit
def _product(
    a_pointers, b_pointers, is_column, A_STEP: tl.constexpr, B_STEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, LENGTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[ROWS, LENGTH] @ [LENGTH, COLUMNS] in fp32, along pointers that are valid for every row."""
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    depth = tl.arange(0, DEPTH)
    for start in range(0, LENGTH, DEPTH):
        if LENGTH % DEPTH == 0:
            a = tl.load(a_pointers)
            b = tl.load(b_pointers, mask=is_column[None, :], other=0.0)
        else:
            inside = start + depth < LENGTH
            a = tl.load(a_pointers, mask=inside[None, :], other=0.0)
            b = tl.load(b_pointers, mask=inside[:, None] & is_column[None, :], other=0.0)
        product = tl.dot(a, b, product, input_precision=PRECISION)
        a_pointers += DEPTH * A_STEP
        b_pointers += DEPTH * B_STEP
    return product


@triton.jit(do_not_specialize=T_DEPENDENT)
def up_kernel(
    x, weight, bias, h, a, token, tiles, num_row_tiles,
    H: tl.constexpr, I: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr, INTERLEAVED: tl.constexpr,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(I, COLUMNS), GROUP)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tiles + tile * 3 + 2)
    source = tl.load(token + row, mask=is_row, other=0).to(tl.int64)
    depth = tl.arange(0, DEPTH)

    # The tile's 2 * COLUMNS weight rows: (gate, up) pairs side by side, unless that would break up contiguous loads.
    place = tl.arange(0, 2 * COLUMNS)
    PAIRED: tl.constexpr = INTERLEAVED or STRIDE_N != 1
    if INTERLEAVED:
        weight_row = 2 * column_tile * COLUMNS + place
        is_weight_row = weight_row < 2 * I
    elif PAIRED:
        weight_row = column_tile * COLUMNS + place // 2 + place % 2 * I
        is_weight_row = column_tile * COLUMNS + place // 2 < I
    else:
        weight_row = column_tile * COLUMNS + place % COLUMNS + place // COLUMNS * I
        is_weight_row = column_tile * COLUMNS + place % COLUMNS < I
    h_tile = _product(
        x + source[:, None] * H + depth[None, :],
        weight + expert * STRIDE_E + weight_row[None, :].to(tl.int64) * STRIDE_N + depth[:, None] * STRIDE_K,
        is_weight_row, 1, STRIDE_K, ROWS, 2 * COLUMNS, H, DEPTH, PRECISION,
    )  # fmt: skip
    if bias is not None:
        bias_row = bias + expert * BIAS_STRIDE_E + weight_row * BIAS_STRIDE_N
        h_tile += tl.load(bias_row, mask=is_weight_row, other=0.0).to(tl.float32)[None, :]

    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_stored = is_row[:, None] & (column < I)[None, :]
    long_row = row.to(tl.int64)[:, None]
    if PAIRED:
        gate, up = tl.split(tl.reshape(h_tile, (ROWS, COLUMNS, 2)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(h_tile, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    if h is not None:
        if INTERLEAVED:
            tl.store(
                h + long_row * (2 * I) + weight_row[None, :],
                h_tile.to(h.dtype.element_ty), mask=is_row[:, None] & is_weight_row[None, :],
            )  # fmt: skip
        else:
            h_pointers = h + long_row * (2 * I) + column[None, :]
            tl.store(h_pointers, gate.to(h.dtype.element_ty), mask=is_stored)
            tl.store(h_pointers + I, up.to(h.dtype.element_ty), mask=is_stored)
    if a is not None:
        activated, _, _ = activate(gate, up, NAME, ALPHA, LIMIT)
        tl.store(a + long_row * I + column[None, :], activated.to(a.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=T_DEPENDENT)
def rows_kernel(
    source, weight, bias, out, tiles, num_row_tiles,
    N: tl.constexpr, K: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_K: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[r] = source[r] @ weight[e]^T (+ bias[e]), weight [E, N, K]."""
    tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(N, COLUMNS), GROUP)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    row = first + tl.arange(0, ROWS)
    is_row = row < end
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    product = _product(
        source + tl.minimum(row, end - 1).to(tl.int64)[:, None] * K + depth[None, :],
        weight + expert * STRIDE_E + column[None, :].to(tl.int64) * STRIDE_N + depth[:, None] * STRIDE_K,
        column < N, 1, STRIDE_K, ROWS, COLUMNS, K, DEPTH, PRECISION,
    )  # fmt: skip
    if bias is not None:
        bias_column = bias + expert * BIAS_STRIDE_E + column * BIAS_STRIDE_N
        product += tl.load(bias_column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * N + column[None, :],
        product.to(out.dtype.element_ty), mask=is_row[:, None] & (column < N)[None, :],
    )  # fmt: skip


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile's left and right half; on tensor-core layouts no value moves between threads."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _backward_piece(
    da, h, dh, a, routed, row, is_row, first_column,
    I: tl.constexpr, INTERLEAVED: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dh and a of some columns, stored; returns these columns' part of <da, act(h)> (`da` is 0 where not wanted)."""
    column = first_column + tl.arange(0, COLUMNS)
    is_stored = is_row & (column < I)[None, :]
    h_start = row * (2 * I)
    if INTERLEAVED:
        wide = 2 * first_column + tl.arange(0, 2 * COLUMNS)
        is_wide = is_row & (wide < 2 * I)[None, :]
        h_tile = tl.load(h + h_start + wide[None, :], mask=is_wide, other=0.0)
        gate, up = tl.split(tl.reshape(h_tile, (ROWS, COLUMNS, 2)))
    else:
        gate = tl.load(h + h_start + column[None, :], mask=is_stored, other=0.0)
        up = tl.load(h + h_start + column[None, :] + I, mask=is_stored, other=0.0)
    activated, dgate, dup = activate(gate.to(tl.float32), up.to(tl.float32), NAME, ALPHA, LIMIT)
    if a is not None:
        tl.store(a + row * I + column[None, :], (routed * activated).to(a.dtype.element_ty), mask=is_stored)
    if dh is not None:
        dgate = (routed * da * dgate).to(dh.dtype.element_ty)
        dup = (routed * da * dup).to(dh.dtype.element_ty)
        if INTERLEAVED:
            joined = tl.reshape(tl.join(dgate, dup), (ROWS, 2 * COLUMNS))
            tl.store(dh + h_start + wide[None, :], joined, mask=is_wide)
        else:
            tl.store(dh + h_start + column[None, :], dgate, mask=is_stored)
            tl.store(dh + h_start + column[None, :] + I, dup, mask=is_stored)
    return tl.sum(da * activated, axis=1)


@triton.jit
def _backward_pieces(
    da, h, dh, a, routed, row, is_row, first_column,
    I: tl.constexpr, INTERLEAVED: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """`_backward_piece` on PIECE columns at a time: whole tiles of da, h, dh and a do not fit in registers together."""
    if COLUMNS <= PIECE:
        dw = _backward_piece(
            da, h, dh, a, routed, row, is_row, first_column, I, INTERLEAVED, NAME, ALPHA, LIMIT, ROWS, COLUMNS
        )
    else:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = _halves(da, ROWS, COLUMNS)
        dw = _backward_pieces(
            left, h, dh, a, routed, row, is_row, first_column, I, INTERLEAVED, NAME, ALPHA, LIMIT, ROWS, HALF, PIECE
        )
        dw += _backward_pieces(
            right, h, dh, a, routed, row, is_row, first_column + HALF,
            I, INTERLEAVED, NAME, ALPHA, LIMIT, ROWS, HALF, PIECE,
        )  # fmt: skip
    return dw


@triton.jit(do_not_specialize=T_DEPENDENT)
def down_backward_kernel(
    dout, weight, h, routing_weight, dh, a, dw_parts, token, pair, tiles, num_row_tiles, num_rows,
    H: tl.constexpr, I: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_I: tl.constexpr,
    INTERLEAVED: tl.constexpr, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, column_tile = swizzle(tl.program_id(0), num_row_tiles, tl.cdiv(I, COLUMNS), GROUP)
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    is_row = row < tl.load(tiles + tile * 3 + 2)
    first_column = column_tile * COLUMNS
    if dh is not None or dw_parts is not None:
        source = tl.load(token + row, mask=is_row, other=0).to(tl.int64)
        column = first_column + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        da = _product(
            dout + source[:, None] * H + depth[None, :],
            weight + expert * STRIDE_E + column[None, :].to(tl.int64) * STRIDE_I + depth[:, None] * STRIDE_H,
            column < I, 1, STRIDE_H, ROWS, COLUMNS, H, DEPTH, PRECISION,
        )  # fmt: skip
    else:
        da = tl.zeros((ROWS, COLUMNS), tl.float32)

    routed = tl.load(routing_weight + tl.load(pair + row, mask=is_row, other=0), mask=is_row, other=0.0)[:, None]
    dw = _backward_pieces(
        da, h, dh, a, routed, row.to(tl.int64)[:, None], is_row[:, None], first_column,
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


def precision(tensor):
    """Three tf32 products stand in for one of fp32; bf16 and fp16 have one way."""
    return "tf32x3" if tensor.element_size() == 4 else "tf32"


class _Launch:
    """How a kernel over sorted rows is launched: its blocks, the programs, the arguments all of them take."""

    def __init__(self, kernel, tensor, rows, num_columns):
        num_pairs, num_experts = rows.token.numel(), rows.offsets.numel() - 1
        blocks = blocks_for(kernel, tensor, num_pairs, num_experts)
        self.row_tiles = max_row_tiles(num_pairs, num_experts)
        self.column_tiles = cdiv(num_columns, blocks.columns)
        self.grid = (self.row_tiles * self.column_tiles,)
        self.tile = (tile_rows(num_pairs, num_experts), blocks.columns, blocks.depth, blocks.group)
        self.options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
        self.piece = blocks.piece


def _bias_strides(bias):
    return (0, 0) if bias is None else bias.stride()


def up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a):
    num_rows, (_, width, hidden) = rows.token.numel(), gate_up_E2IH.shape
    h_R2I = x_TH.new_empty(num_rows, width) if want_h else None
    a_RI = x_TH.new_empty(num_rows, width // 2) if want_a else None
    if num_rows:
        how = _Launch("up", x_TH, rows, width // 2)
        launch(
            up_kernel, how.grid, (x_TH, gate_up_E2IH, bias_E2I, h_R2I, a_RI, rows.token, rows.tiles), (how.row_tiles,),
            (hidden, width // 2, *gate_up_E2IH.stride(), *_bias_strides(bias_E2I), interleaved, *activation, *how.tile,
             precision(x_TH)),
            **how.options,
        )  # fmt: skip
    return h_R2I, a_RI


def _rows_product(kernel, source_RK, weight_ENK, bias_EN, rows):
    num_rows, (_, columns, length) = rows.token.numel(), weight_ENK.shape
    out_RN = source_RK.new_empty(num_rows, columns)
    if num_rows:
        how = _Launch(kernel, source_RK, rows, columns)
        launch(
            rows_kernel, how.grid, (source_RK, weight_ENK, bias_EN, out_RN, rows.tiles), (how.row_tiles,),
            (columns, length, *weight_ENK.stride(), *_bias_strides(bias_EN), *how.tile, precision(source_RK)),
            **how.options,
        )  # fmt: skip
    return out_RN


def down(a_RI, down_EHI, bias_EH, rows):
    return _rows_product("down", a_RI, down_EHI, bias_EH, rows)


def input_rows(dh_R2I, gate_up_E2IH, rows):
    return _rows_product("input_rows", dh_R2I, gate_up_E2IH.transpose(1, 2), None, rows)


def down_backward(
    dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw
):
    num_rows, (_, hidden, inner) = rows.token.numel(), down_EHI.shape
    dh_R2I = dout_TH.new_empty(num_rows, 2 * inner) if want_dh else None
    a_RI = dout_TH.new_empty(num_rows, inner) if want_a else None
    parts = None
    if num_rows:
        how = _Launch("down_backward", dout_TH, rows, inner)
        parts = weight_P.new_empty(how.column_tiles, num_rows) if want_dw else None
        launch(
            down_backward_kernel, how.grid,
            (dout_TH, down_EHI, h_R2I, weight_P, dh_R2I, a_RI, parts, rows.token, rows.pair, rows.tiles),
            (how.row_tiles, num_rows),
            (hidden, inner, *down_EHI.stride(), interleaved, *activation, *how.tile,
             how.piece // 2 if interleaved else how.piece, precision(dout_TH)),
            **how.options,
        )  # fmt: skip
    if not want_dw:
        return dh_R2I, a_RI, None
    return dh_R2I, a_RI, weight_P.new_zeros(0) if parts is None else routing_gradient(parts, dout_TH, bias_EH, rows)


def routing_gradient(parts, dout_TH, bias_EH, rows):
    """dw [P]: the parts [column tiles, P] of every row summed in their order, + <dout, bias>; zero for dropped pairs."""
    (column_tiles, num_rows), num_experts = parts.shape, rows.offsets.numel() - 1
    dw_P = parts.new_zeros(num_rows)
    launch(
        routing_gradient_kernel, (max_row_tiles(num_rows, num_experts),),
        (parts, dout_TH, bias_EH, dw_P, rows.token, rows.pair, rows.tiles), (num_rows,),
        (dout_TH.shape[1], *_bias_strides(bias_EH), column_tiles, tile_rows(num_rows, num_experts), 64), num_warps=4,
    )  # fmt: skip
    return dw_P
