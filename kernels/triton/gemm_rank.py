"""Products of low-rank adapters with one side of rank r: rows of rank r (u, v, dv, du), and the factors' gradients.

Both read the wide side once, whatever the rank up to 64; that read is what takes the time.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from .config import blocks_for, max_row_tiles, tile_rows
from .gemm_common import T_DEPENDENT, pointer_product, precision
from .launch import cdiv, launch_kernel, next_power_of_2

MIN_COLUMNS = 16  # of a tensor core's tile


def _rank_columns(rank: int, max_columns: int) -> int:
    """Of a tile, along the rank."""
    return min(max(next_power_of_2(rank), MIN_COLUMNS), max_columns)


@triton.jit(do_not_specialize=[*T_DEPENDENT, "scale_bits"])
def gemm_rank_kernel(
    source, factor, out, token, tiles, num_row_tiles, scale_bits,
    J: tl.constexpr, K: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_J: tl.constexpr, STRIDE_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[r] = scale * source[r] @ factor[e]^T, factor [E, J, K]; source[token[r]] unless `token` is None."""
    column_tiles: tl.constexpr = (J + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // column_tiles
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    row = tl.load(tiles + tile * 3 + 1) + tl.arange(0, ROWS)
    end = tl.load(tiles + tile * 3 + 2)
    source_row = tl.minimum(row, end - 1)  # past the end: as in gemm_up
    if token is not None:
        source_row = tl.load(token + source_row)
    j = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    product = pointer_product(
        source + source_row.to(tl.int64)[:, None] * K + depth[None, :],
        factor + expert.to(tl.int64) * STRIDE_E + j[None, :] * STRIDE_J + depth[:, None] * STRIDE_K,
        j < J, 1, STRIDE_K, ROWS, COLUMNS, K, DEPTH, PRECISION,
    )  # fmt: skip
    product *= scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
    is_stored = (row < end)[:, None] & (j < J)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * J + j[None, :], product.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _add_rank_rows(
    product, wide, rank, routing_weight, token, pair, first, end, m, j,
    M: tl.constexpr, J: tl.constexpr, DEPTH: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """product + wide[r]^T rank[r] over DEPTH rows from `first`."""
    row = first + tl.arange(0, DEPTH)
    is_wide = (m < M)[None, :]
    is_rank = (j < J)[None, :]
    source_row = row
    if MASKED:  # on both sides: a row past the end may hold NaN
        is_wide &= (row < end)[:, None]
        is_rank &= (row < end)[:, None]
        if token is not None:
            source_row = tl.load(token + row, mask=row < end, other=0)
    else:
        if token is not None:
            source_row = tl.load(token + row)
    left = tl.load(wide + source_row.to(tl.int64)[:, None] * M + m[None, :], mask=is_wide, other=0.0)
    right = tl.load(rank + row.to(tl.int64)[:, None] * J + j[None, :], mask=is_rank, other=0.0)
    if routing_weight is not None:
        routed = tl.load(routing_weight + tl.load(pair + row, mask=row < end, other=0), mask=row < end, other=0.0)
        right = (right.to(tl.float32) * routed[:, None]).to(right.dtype)
    return tl.dot(tl.trans(left), right, product, input_precision=PRECISION)


@triton.jit
def gemm_rank_wgrad_kernel(
    wide, rank, out, routing_weight, token, pair, offsets,
    M: tl.constexpr, J: tl.constexpr, R: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr,
    STRIDE_R: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows r of e of wide[r]^T (weight[r] * rank[r]), out [E, M, R]: the first R of J columns.
    wide[token[r]] unless `token` is None, weight 1 unless there are some."""
    HIGH: tl.constexpr = (M + HEIGHT - 1) // HEIGHT
    WIDE: tl.constexpr = (R + WIDTH - 1) // WIDTH
    expert = tl.program_id(0) // (HIGH * WIDE)
    m = tl.program_id(0) % (HIGH * WIDE) // WIDE * HEIGHT + tl.arange(0, HEIGHT)
    j = tl.program_id(0) % WIDE * WIDTH + tl.arange(0, WIDTH)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    full = start + (end - start) // DEPTH * DEPTH
    product = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for first in range(start, full, DEPTH):
        product = _add_rank_rows(
            product, wide, rank, routing_weight, token, pair, first, end, m, j, M, J, DEPTH, False, PRECISION
        )
    if full < end:
        product = _add_rank_rows(
            product, wide, rank, routing_weight, token, pair, full, end, m, j, M, J, DEPTH, True, PRECISION
        )
    tl.store(
        out + expert.to(tl.int64) * STRIDE_E + m[:, None].to(tl.int64) * STRIDE_M + j[None, :] * STRIDE_R,
        product.to(out.dtype.element_ty), mask=(m < M)[:, None] & (j < R)[None, :],
    )  # fmt: skip


def rank_rows(source, a_EJK, rows, scale, gathered):
    num_pairs, (num_experts, rank, length) = rows.token.numel(), a_EJK.shape
    out_PJ = source.new_empty(num_pairs, rank)
    if num_pairs:
        blocks = blocks_for("rank_rows", source, num_pairs, num_experts)
        columns = _rank_columns(rank, blocks.columns)
        (scale_bits,) = struct.unpack("<i", struct.pack("<f", scale))  # a number: launches take no others
        row_tiles = max_row_tiles(num_pairs, num_experts)
        launch_kernel(
            gemm_rank_kernel, (row_tiles * cdiv(rank, columns),),
            (source, a_EJK, out_PJ, rows.token if gathered else None, rows.tiles), (row_tiles, scale_bits),
            (rank, length, *a_EJK.stride(), tile_rows(num_pairs, num_experts), columns, blocks.depth,
             precision(source)),
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return out_PJ


def rank_backward(source, b_ENJ, rank_PJ, weight_P, rows, scale, gathered, want_rank, like_ENj):
    drank_PJ = rank_rows(source, b_ENJ.transpose(1, 2), rows, scale, gathered) if want_rank else None
    if like_ENj is None:
        return drank_PJ, None
    return drank_PJ, _factor_gradient(source, rank_PJ, weight_P, rows, gathered, like_ENj)


def factor_gradient(rank_PJ, source, rows, gathered, like_EjK):
    return _factor_gradient(source, rank_PJ, None, rows, gathered, like_EjK.transpose(1, 2)).transpose(1, 2)


def _factor_gradient(wide, rank_PJ, weight_P, rows, gathered, like_EMR):
    """wide^T rank in the strides of `like_EMR`. Where experts lie closest there, as in PEFT's B, stores would be single
    elements: the gradient is written expert by expert and reordered."""
    num_experts, height, rank = like_EMR.shape
    gradient = torch.empty_like(like_EMR)
    written = gradient
    if num_experts > 1 and 1 not in gradient.stride()[1:]:
        written = gradient.new_empty(like_EMR.shape)
    blocks = blocks_for("rank_gradient", wide, rows.token.numel(), num_experts)
    width = _rank_columns(rank, blocks.width)
    launch_kernel(
        gemm_rank_wgrad_kernel, (num_experts * cdiv(height, blocks.height) * cdiv(rank, width),),
        (wide, rank_PJ, written, weight_P, rows.token if gathered else None, rows.pair, rows.offsets), (),
        (height, rank_PJ.shape[1], rank, *written.stride(), blocks.height, width, blocks.depth, precision(wide)),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return gradient if written is gradient else gradient.copy_(written)
