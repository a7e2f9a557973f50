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
from .reorder import reorder

MIN_COLUMNS = 16  # of a tensor core's tile


def _rank_columns(rank: int, max_columns: int) -> int:
    """Of a tile, along the rank."""
    return min(max(next_power_of_2(rank), MIN_COLUMNS), max_columns)


@triton.jit
def _rank_tile(
    source, factor, out, token, expert, first, end, first_j, scale_bits,
    J: tl.constexpr, K: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_J: tl.constexpr, STRIDE_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[r] = scale * source[r] @ factor[e]^T of ROWS rows and COLUMNS columns, factor [E, J, K]; source[token[r]]
    unless `token` is None."""
    row = first + tl.arange(0, ROWS)
    source_row = tl.minimum(row, end - 1)  # past the end: as in gemm_up
    if token is not None:
        source_row = tl.load(token + source_row)
    j = first_j + tl.arange(0, COLUMNS)
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
    """product + wide[r]^T (weight[r] * rank[r]) over DEPTH rows from `first`."""
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
def _wgrad_tile(
    wide, rank, out, routing_weight, token, pair, expert, start, end, tile,
    M: tl.constexpr, J: tl.constexpr, R: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr,
    STRIDE_R: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of out[e] = sum over the rows r of e of wide[r]^T (weight[r] * rank[r]), out [E, M, R]: the first R of J
    columns. wide[token[r]] unless `token` is None, weight 1 unless there are some."""
    WIDE: tl.constexpr = (R + WIDTH - 1) // WIDTH
    m = tile // WIDE * HEIGHT + tl.arange(0, HEIGHT)
    j = tile % WIDE * WIDTH + tl.arange(0, WIDTH)
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


@triton.jit(do_not_specialize=[*T_DEPENDENT, "scale_bits"])
def gemm_rank_kernel(
    source, factor, out, token, tiles, num_row_tiles, scale_bits,
    J: tl.constexpr, K: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_J: tl.constexpr, STRIDE_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u, v: `_rank_tile` of every row."""
    column_tiles: tl.constexpr = (J + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // column_tiles
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    _rank_tile(
        source, factor, out, token, expert, tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2),
        tl.program_id(0) % column_tiles * COLUMNS, scale_bits,
        J, K, STRIDE_E, STRIDE_J, STRIDE_K, ROWS, COLUMNS, DEPTH, PRECISION,
    )  # fmt: skip


@triton.jit
def gemm_rank_wgrad_kernel(
    wide, rank, out, routing_weight, token, pair, offsets,
    M: tl.constexpr, J: tl.constexpr, R: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr,
    STRIDE_R: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA: `_wgrad_tile` of every expert."""
    TILES: tl.constexpr = (M + HEIGHT - 1) // HEIGHT * ((R + WIDTH - 1) // WIDTH)
    expert = tl.program_id(0) // TILES
    _wgrad_tile(
        wide, rank, out, routing_weight, token, pair, expert, tl.load(offsets + expert), tl.load(offsets + expert + 1),
        tl.program_id(0) % TILES, M, J, R, STRIDE_E, STRIDE_M, STRIDE_R, HEIGHT, WIDTH, DEPTH, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_bits"])
def gemm_rank_backward_kernel(
    source, factor, drank, rank, gradient, routing_weight, token, pair, offsets, scale_bits,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, N: tl.constexpr, J: tl.constexpr, R: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr,
    STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr, STRIDE_R: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """drank (dv, du) and dB, expert by expert: both read the expert's rows of `source`, the second time from L2."""
    COLUMN_TILES: tl.constexpr = (J + COLUMNS - 1) // COLUMNS
    GRADIENT_TILES: tl.constexpr = (N + HEIGHT - 1) // HEIGHT * ((R + WIDTH - 1) // WIDTH)
    bins = tl.arange(0, BINS)
    starts = tl.load(offsets + bins, mask=bins < NUM_EXPERTS, other=0)
    ends = tl.load(offsets + bins + 1, mask=bins < NUM_EXPERTS, other=0)
    num_programs = tl.cdiv(ends - starts, ROWS) * COLUMN_TILES + GRADIENT_TILES
    program = tl.program_id(0)
    expert = tl.sum((tl.cumsum(num_programs, 0) <= program).to(tl.int32))
    if expert >= NUM_EXPERTS:
        return
    place = program - tl.sum(tl.where(bins < expert, num_programs, 0))
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    num_rank_tiles = tl.cdiv(end - start, ROWS) * COLUMN_TILES
    if place < num_rank_tiles:
        _rank_tile(
            source, factor, drank, token, expert, start + place // COLUMN_TILES * ROWS, end,
            place % COLUMN_TILES * COLUMNS, scale_bits,
            J, N, FACTOR_STRIDE_E, FACTOR_STRIDE_J, FACTOR_STRIDE_N, ROWS, COLUMNS, DEPTH, PRECISION,
        )  # fmt: skip
    else:
        _wgrad_tile(
            source, rank, gradient, routing_weight, token, pair, expert, start, end, place - num_rank_tiles,
            N, J, R, STRIDE_E, STRIDE_N, STRIDE_R, HEIGHT, WIDTH, STEP, PRECISION,
        )  # fmt: skip


def _bits(scale: float) -> int:
    """Of an fp32: launches take whole numbers alone."""
    return struct.unpack("<i", struct.pack("<f", scale))[0]


def rank_rows(source, a_EJK, rows, scale, gathered):
    num_pairs, (num_experts, rank, length) = rows.token.numel(), a_EJK.shape
    out_PJ = source.new_empty(num_pairs, rank)
    if num_pairs:
        blocks = blocks_for("rank_rows", source, num_pairs, num_experts)
        columns = _rank_columns(rank, blocks.columns)
        row_tiles = max_row_tiles(num_pairs, num_experts)
        launch_kernel(
            gemm_rank_kernel, (row_tiles * cdiv(rank, columns),),
            (source, a_EJK, out_PJ, rows.token if gathered else None, rows.tiles), (row_tiles, _bits(scale)),
            (rank, length, *a_EJK.stride(), tile_rows(num_pairs, num_experts), columns, blocks.depth,
             precision(source)),
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return out_PJ


def factor_gradient(rank_PJ, source, rows, gathered, like_EjK):
    gradient = torch.empty_like(like_EjK)
    num_experts, rank, height = like_EjK.shape
    stride_e, stride_r, stride_m = gradient.stride()
    blocks = blocks_for("rank_gradient", source, rows.token.numel(), num_experts)
    width = _rank_columns(rank, blocks.width)
    launch_kernel(
        gemm_rank_wgrad_kernel, (num_experts * cdiv(height, blocks.height) * cdiv(rank, width),),
        (source, rank_PJ, gradient, None, rows.token if gathered else None, rows.pair, rows.offsets), (),
        (height, rank_PJ.shape[1], rank, stride_e, stride_m, stride_r, blocks.height, width, blocks.depth,
         precision(source)),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return gradient


def rank_backward(source, b_ENJ, rank_PJ, weight_P, rows, scale, gathered, want_rank, like_ENj):
    num_pairs, (num_experts, size, padded) = rows.token.numel(), b_ENJ.shape
    if like_ENj is None:
        drank_PJ = rank_rows(source, b_ENJ.transpose(1, 2), rows, scale, gathered) if want_rank else None
        return drank_PJ, None
    rank = like_ENj.shape[2]
    # where experts lie closest, as in PEFT's B, stores would be single elements
    is_reordered = like_ENj.stride(0) == 1 and num_experts > 1
    gradient = like_ENj.new_empty(like_ENj.shape) if is_reordered else torch.empty_like(like_ENj)
    blocks = blocks_for("rank_gradient", source, num_pairs, num_experts)
    width, token = _rank_columns(rank, blocks.width), rows.token if gathered else None
    tile = blocks.height, width, blocks.depth
    gradient_tiles = cdiv(size, blocks.height) * cdiv(rank, width)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    if want_rank and num_pairs:
        drank_PJ = source.new_empty(num_pairs, padded)
        row_blocks = blocks_for("rank_rows", source, num_pairs, num_experts)
        columns = _rank_columns(padded, row_blocks.columns)
        stride_e, stride_n, stride_j = b_ENJ.stride()
        launch_kernel(
            gemm_rank_backward_kernel,
            (max_row_tiles(num_pairs, num_experts) * cdiv(padded, columns) + num_experts * gradient_tiles,),
            (source, b_ENJ, drank_PJ, rank_PJ, gradient, weight_P, token, rows.pair, rows.offsets), (_bits(scale),),
            (num_experts, next_power_of_2(num_experts), size, padded, rank, stride_e, stride_j, stride_n,
             *gradient.stride(), tile_rows(num_pairs, num_experts), columns, row_blocks.depth, *tile,
             precision(source)),
            **options,
        )  # fmt: skip
    else:
        drank_PJ = source.new_empty(0, padded) if want_rank else None
        launch_kernel(
            gemm_rank_wgrad_kernel, (num_experts * gradient_tiles,),
            (source, rank_PJ, gradient, weight_P, token, rows.pair, rows.offsets), (),
            (size, padded, rank, *gradient.stride(), *tile, precision(source)),
            **options,
        )  # fmt: skip
    if not is_reordered:
        return drank_PJ, gradient
    reordered = torch.empty_like(like_ENj)
    reorder(gradient, reordered)
    return drank_PJ, reordered
