"""Products of low-rank adapters with one side of rank r: rows of rank r (u, v, dv, du), and the factors' gradients.

Both read the wide side once, whatever the rank up to 64; that read is what takes the time.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from ..low_rank import a_by_expert, b_by_expert, swapped
from .config import blocks_for, max_row_tiles, tile_rows
from .gemm_common import T_DEPENDENT, pointer_product, precision
from .launch import cdiv, launch_kernel, next_power_of_2
from .reorder import ENTRIES, reorder_in_turn, reorder_job

MIN_COLUMNS = 16  # of a tensor core's tile
ONE_PASS_RANK = 32  # beyond it, partial sums of dv and du cost more than reading the wide side again
SUMMED = 1024  # entries of a program that sums them


def _rank_columns(rank: int, max_columns: int) -> int:
    """Of a tile, along the rank."""
    return min(max(next_power_of_2(rank), MIN_COLUMNS), max_columns)


@triton.jit
def _add_lora_shrink(
    product, wide, shrunk, routing_weight, token, pair, first, end, m, j,
    M: tl.constexpr, J: tl.constexpr, DEPTH: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """product + wide[r]^T (weight[r] * shrunk[r]) over DEPTH rows from `first`."""
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
    right = tl.load(shrunk + row.to(tl.int64)[:, None] * J + j[None, :], mask=is_rank, other=0.0)
    if routing_weight is not None:
        routed = tl.load(routing_weight + tl.load(pair + row, mask=row < end, other=0), mask=row < end, other=0.0)
        right = (right.to(tl.float32) * routed[:, None]).to(right.dtype)
    return tl.dot(tl.trans(left), right, product, input_precision=PRECISION)


@triton.jit(do_not_specialize=[*T_DEPENDENT, "scale_bits"])
def gemm_rank_kernel(
    source, factor, out, token, tiles, num_row_tiles, scale_bits,
    J: tl.constexpr, K: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_J: tl.constexpr, STRIDE_K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u, v: out[r] = scale * source[r] @ factor[e]^T, factor [E, J, K]; source[token[r]] unless `token` is None."""
    column_tiles: tl.constexpr = (J + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // column_tiles
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    first = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    first_j = tl.program_id(0) % column_tiles * COLUMNS
    row = first + tl.arange(0, ROWS)
    source_row = tl.minimum(row, end - 1)  # past the end: as in gemm_up
    if token is not None:
        source_row = tl.load(token + source_row)
    j = first_j + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    product = pointer_product(
        source + source_row.to(tl.int64)[:, None] * K + depth[None, :],
        factor + expert.to(tl.int64) * STRIDE_E + j[None, :] * STRIDE_J + depth[:, None] * STRIDE_K,
        None, None, None, None, j < J, 1, STRIDE_K, ROWS, COLUMNS, K, DEPTH, PRECISION,
    )  # fmt: skip
    product *= scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
    is_stored = (row < end)[:, None] & (j < J)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * J + j[None, :], product.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def gemm_rank_wgrad_kernel(
    wide, shrunk, out, routing_weight, token, pair, offsets, NUM_EXPERTS: tl.constexpr,
    M: tl.constexpr, J: tl.constexpr, R: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr,
    STRIDE_R: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of out[e] = sum over the rows r of e of wide[r]^T (weight[r] * shrunk[r]), out [E, M, R]: the first R of J
    columns. wide[token[r]] unless `token` is None, weight 1 unless there are some. Gathered rows are read from L2 by
    all experts but the first: experts of a tile come one after the other."""
    RANK_TILES: tl.constexpr = (R + WIDTH - 1) // WIDTH
    if token is not None:
        expert = tl.program_id(0) % NUM_EXPERTS
        tile = tl.program_id(0) // NUM_EXPERTS
    else:
        TILES: tl.constexpr = (M + HEIGHT - 1) // HEIGHT * RANK_TILES
        expert = tl.program_id(0) // TILES
        tile = tl.program_id(0) % TILES
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    m = tile // RANK_TILES * HEIGHT + tl.arange(0, HEIGHT)
    j = tile % RANK_TILES * WIDTH + tl.arange(0, WIDTH)
    full = start + (end - start) // DEPTH * DEPTH
    product = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for first in range(start, full, DEPTH):
        product = _add_lora_shrink(
            product, wide, shrunk, routing_weight, token, pair, first, end, m, j, M, J, DEPTH, False, PRECISION
        )
    if full < end:
        product = _add_lora_shrink(
            product, wide, shrunk, routing_weight, token, pair, full, end, m, j, M, J, DEPTH, True, PRECISION
        )
    tl.store(
        out + expert.to(tl.int64) * STRIDE_E + m[:, None].to(tl.int64) * STRIDE_M + j[None, :] * STRIDE_R,
        product.to(out.dtype.element_ty),
        mask=(m < M)[:, None] & (j < R)[None, :],
    )


@triton.jit(do_not_specialize=["num_pairs", "scale_bits"])
def gemm_rank_backward_kernel(
    source, factor, dshrunk, shrunk, gradient, routing_weight, token, pair, offsets, num_pairs, scale_bits,
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, J: tl.constexpr, R: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr,
    STRIDE_R: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dB of WIDTH columns of `source`, and what these columns add to dshrunk (dv, du), from one read of them: dshrunk
    [slices, P, J], to be summed, or dshrunk itself where one slice has every column. Experts of a slice come one after
    the other, so that rows which several experts gather are read from L2."""
    expert = tl.program_id(0) % NUM_EXPERTS
    slice = tl.program_id(0) // NUM_EXPERTS
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    n = slice * WIDTH + tl.arange(0, WIDTH)
    j = tl.arange(0, COLUMNS)
    is_column = n < N
    is_rank = j < J
    right = tl.load(
        factor + expert.to(tl.int64) * FACTOR_STRIDE_E + n[:, None] * FACTOR_STRIDE_N + j[None, :] * FACTOR_STRIDE_J,
        mask=is_column[:, None] & is_rank[None, :],
        other=0.0,
    )
    product = tl.zeros((WIDTH, COLUMNS), tl.float32)
    out = dshrunk + slice.to(tl.int64) * num_pairs * J
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        source_row = row
        if token is not None:
            source_row = tl.load(token + row, mask=is_row, other=0)
        wide = tl.load(
            source + source_row.to(tl.int64)[:, None] * N + n[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        entry = row.to(tl.int64)[:, None] * J + j[None, :]
        is_entry = is_row[:, None] & is_rank[None, :]
        rows_j = tl.load(shrunk + entry, mask=is_entry, other=0.0)
        if routing_weight is not None:
            routed = tl.load(routing_weight + tl.load(pair + row, mask=is_row, other=0), mask=is_row, other=0.0)
            rows_j = (rows_j.to(tl.float32) * routed[:, None]).to(rows_j.dtype)
        part = tl.dot(wide, right, input_precision=PRECISION)
        product = tl.dot(tl.trans(wide), rows_j, product, input_precision=PRECISION)
        if N <= WIDTH:
            part *= scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(out + entry, part.to(dshrunk.dtype.element_ty), mask=is_entry)
    tl.store(
        gradient + expert.to(tl.int64) * STRIDE_E + n[:, None].to(tl.int64) * STRIDE_N + j[None, :] * STRIDE_R,
        product.to(gradient.dtype.element_ty),
        mask=is_column[:, None] & (j < R)[None, :],
    )


@triton.jit(do_not_specialize=["num_pairs", "scale_bits"])
def finish_kernel(
    gradient, reordered, part, dshrunk, num_pairs, scale_bits, SLICES: tl.constexpr, J: tl.constexpr,
    SUMMED: tl.constexpr, JOB: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """dB in its own order, unless `reordered` is None; and, unless `part` is, dshrunk[P, J] = scale * the sum of
    part[SLICES, P, J]; rows past R, which nothing was written to, are sums of what lies there."""
    tile = reorder_in_turn(gradient, reordered, tl.program_id(0), JOB, ENTRIES)
    if part is not None:  # noqa: SIM102  (known when it is compiled)
        if tile >= 0:
            size = num_pairs.to(tl.int64) * J
            entry = tile.to(tl.int64) * SUMMED + tl.arange(0, SUMMED)
            is_there = entry < size
            total = tl.zeros((SUMMED,), tl.float32)
            for slice in tl.static_range(SLICES):
                total += tl.load(part + slice * size + entry, mask=is_there, other=0.0)
            total *= scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
            tl.store(dshrunk + entry, total.to(dshrunk.dtype.element_ty), mask=is_there)


def _bits(scale: float) -> int:
    """Of an fp32: launches take whole numbers alone."""
    return struct.unpack("<i", struct.pack("<f", scale))[0]


def lora_shrink(source, factor_EKJ, rows, scale, gathered):
    num_pairs, (num_experts, length, rank) = rows.token.shape[0], factor_EKJ.shape
    out_PJ = source.new_empty(num_pairs, rank)
    if num_pairs:
        by_expert, by_depth, by_rank = factor_EKJ.stride()
        blocks = blocks_for("lora_shrink", source, num_pairs, num_experts)
        columns, row_tiles = _rank_columns(rank, blocks.columns), max_row_tiles(num_pairs, num_experts)
        launch_kernel(
            gemm_rank_kernel, (row_tiles * cdiv(rank, columns),),
            (source, factor_EKJ, out_PJ, rows.token if gathered else None, rows.tiles), (row_tiles, _bits(scale)),
            (rank, length, by_expert, by_rank, by_depth, tile_rows(num_pairs, num_experts), columns, blocks.depth,
             precision(source.dtype)),
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return out_PJ


def _factor_gradient(source, shrunk_PJ, out, shape_EMr, strides, weight_P, rows, gathered):
    """Of a factor [E, M, r] that lies in `out` with these strides."""
    num_experts, height, rank = shape_EMr
    blocks = blocks_for("rank_gradient", source, shrunk_PJ.shape[0], num_experts)
    width = _rank_columns(rank, blocks.width)
    launch_kernel(
        gemm_rank_wgrad_kernel, (num_experts * cdiv(height, blocks.height) * cdiv(rank, width),),
        (source, shrunk_PJ, out, weight_P, rows.token if gathered else None, rows.pair, rows.offsets), (),
        (num_experts, height, shrunk_PJ.shape[1], rank, *strides, blocks.height, width, blocks.depth,
         precision(source.dtype)),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


def lora_a_gradient(shrunk_PJ, source, rows, gathered, like_EjK):
    gradient = torch.empty_like(like_EjK)
    where = swapped(a_by_expert(gradient.shape, gradient.stride(), rows.offsets.shape[0] - 1))
    _factor_gradient(source, shrunk_PJ, gradient, *where, None, rows, gathered)
    return gradient


def lora_b_backward(source, b_ENJ, shrunk_PJ, weight_P, rows, scale, gathered, want_dshrunk, like_ENj):
    if like_ENj is None:
        dshrunk_PJ = lora_shrink(source, b_ENJ, rows, scale, gathered) if want_dshrunk else None
        return dshrunk_PJ, None
    result = torch.empty_like(like_ENj)
    (num_pairs, padded), num_experts = shrunk_PJ.shape, b_ENJ.shape[0]
    shape_ENr, strides = b_by_expert(result.shape, result.stride(), num_experts)
    _, size, rank = shape_ENr
    # where experts lie closest, as in PEFT's B, stores would be single elements
    is_reordered = strides[0] == 1 and num_experts > 1
    written = (size * rank, rank, 1) if is_reordered else strides
    job = reorder_job(shape_ENr, written, shape_ENr, strides) if is_reordered else None
    is_one_pass = want_dshrunk and num_pairs > 0 and padded <= ONE_PASS_RANK
    blocks, slices = None, 1
    if is_one_pass:
        kernel = "rank_backward_gathered" if gathered else "lora_b_backward"
        blocks = blocks_for(kernel, source, num_pairs, num_experts)
        slices = cdiv(size, blocks.height)
    # in fp32: dB before it is reordered, and the slices that dv or du is the sum of
    parts = cdiv(num_experts * size * rank, 4) * 4 if is_reordered else 0  # a multiple of 16 bytes
    summed = slices * num_pairs * padded if slices > 1 else 0
    gradient, slices_of_shrunk = result, None
    if parts + summed:
        scratch = torch.empty(parts + summed, dtype=torch.float32, device=source.device)
        gradient = scratch if is_reordered else result
        slices_of_shrunk = scratch[parts:] if summed else None
    dshrunk_PJ = None
    if is_one_pass:
        dshrunk_PJ = torch.empty_like(shrunk_PJ)
        by_expert, by_row, by_rank = b_ENJ.stride()
        sums, token = dshrunk_PJ if slices_of_shrunk is None else slices_of_shrunk, rows.token if gathered else None
        launch_kernel(
            gemm_rank_backward_kernel, (slices * num_experts,),
            (source, b_ENJ, sums, shrunk_PJ, gradient, weight_P, token, rows.pair, rows.offsets),
            (num_pairs, _bits(scale)),
            (num_experts, size, padded, rank, by_expert, by_rank, by_row, *written, blocks.height,
             _rank_columns(padded, ONE_PASS_RANK), blocks.depth, precision(source.dtype)),
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    else:
        if want_dshrunk:
            dshrunk_PJ = lora_shrink(source, b_ENJ, rows, scale, gathered)
        _factor_gradient(source, shrunk_PJ, gradient, shape_ENr, written, weight_P, rows, gathered)
    tiles = (job[-1] if job else 0) + cdiv(summed // slices, SUMMED)
    if tiles:
        launch_kernel(
            finish_kernel,
            (tiles,),
            (gradient, result if is_reordered else None, slices_of_shrunk, dshrunk_PJ),
            (num_pairs, _bits(scale)),
            (slices, padded, SUMMED, job, ENTRIES),
            num_warps=4,
        )
    return dshrunk_PJ, result
