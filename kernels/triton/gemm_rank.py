"""Products of low-rank adapters with one side of rank r: rows of rank r (u, v, dv, du), and the factors' gradients.

Both read the wide side once, whatever the rank up to 64; that read is what takes the time.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from ..low_rank import a_by_expert, swapped
from .config import blocks_for, max_row_tiles, tile_rows
from .gemm_common import T_DEPENDENT, pointer_product, precision
from .launch import cdiv, launch_kernel, next_power_of_2

MIN_COLUMNS = 16  # of a tensor core's tile


def rank_columns(rank: int, max_columns: int) -> int:
    """Choose the columns of a tile along the rank."""
    return min(max(next_power_of_2(rank), MIN_COLUMNS), max_columns)


@triton.jit
def _add_outer_products(
    product,
    wide,
    shrunk,
    routing_weight,
    token,
    pair,
    first,
    end,
    m,
    j,
    M: tl.constexpr,
    J: tl.constexpr,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add wide[r]^T (weight[r] * shrunk[r]) over DEPTH rows from `first` to a product."""
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
    source,
    factor,
    out,
    token,
    tiles,
    num_row_tiles,
    scale_bits,
    J: tl.constexpr,
    K: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_J: tl.constexpr,
    STRIDE_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute u, v: out[r] = scale * source[r] @ factor[e]^T, factor [E, J, K]; source[token[r]] unless `token` is
    None."""
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
        None,
        None,
        None,
        None,
        j < J,
        1,
        STRIDE_K,
        ROWS,
        COLUMNS,
        K,
        DEPTH,
        PRECISION,
    )
    product *= scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
    is_stored = (row < end)[:, None] & (j < J)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * J + j[None, :], product.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def gemm_rank_wgrad_kernel(
    wide,
    shrunk,
    out,
    routing_weight,
    token,
    pair,
    offsets,
    NUM_EXPERTS: tl.constexpr,
    M: tl.constexpr,
    J: tl.constexpr,
    R: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_M: tl.constexpr,
    STRIDE_R: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a tile of out[e] = sum over the rows r of e of wide[r]^T (weight[r] * shrunk[r]), out [E, M, R]: the first
    R of J columns. wide[token[r]] unless `token` is None, weight 1 where routing_weight is None. Programs of gathered
    rows take a tile's experts one after the other, so that all but the first read these rows from L2."""
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
        product = _add_outer_products(
            product, wide, shrunk, routing_weight, token, pair, first, end, m, j, M, J, DEPTH, False, PRECISION
        )
    if full < end:
        product = _add_outer_products(
            product, wide, shrunk, routing_weight, token, pair, full, end, m, j, M, J, DEPTH, True, PRECISION
        )
    tl.store(
        out + expert.to(tl.int64) * STRIDE_E + m[:, None].to(tl.int64) * STRIDE_M + j[None, :] * STRIDE_R,
        product.to(out.dtype.element_ty),
        mask=(m < M)[:, None] & (j < R)[None, :],
    )


def fp32_bits(scale: float) -> int:
    """Reinterpret an fp32 as an int32, because launches take whole numbers alone."""
    return struct.unpack("<i", struct.pack("<f", scale))[0]


def lora_shrink(source, factor_EKJ, rows, scale, gathered):
    num_pairs, (num_experts, length, rank) = rows.token.shape[0], factor_EKJ.shape
    out_PJ = source.new_empty(num_pairs, rank)
    if num_pairs:
        by_expert, by_depth, by_rank = factor_EKJ.stride()
        blocks = blocks_for("lora_shrink", source, num_pairs, num_experts)
        columns, row_tiles = rank_columns(rank, blocks.columns), max_row_tiles(num_pairs, num_experts)
        launch_kernel(
            gemm_rank_kernel,
            (row_tiles * cdiv(rank, columns),),
            (source, factor_EKJ, out_PJ, rows.token if gathered else None, rows.tiles),
            (row_tiles, fp32_bits(scale)),
            (
                rank,
                length,
                by_expert,
                by_rank,
                by_depth,
                tile_rows(num_pairs, num_experts),
                columns,
                blocks.depth,
                precision(source.dtype),
            ),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return out_PJ


def factor_gradient(source, shrunk_PJ, out, shape_EMr, strides, weight_P, rows, gathered):
    """Compute the gradient of a factor [E, M, r] that lies in `out` with these strides."""
    num_experts, height, rank = shape_EMr
    blocks = blocks_for("rank_gradient", source, shrunk_PJ.shape[0], num_experts)
    width = rank_columns(rank, blocks.width)
    launch_kernel(
        gemm_rank_wgrad_kernel,
        (num_experts * cdiv(height, blocks.height) * cdiv(rank, width),),
        (source, shrunk_PJ, out, weight_P, rows.token if gathered else None, rows.pair, rows.offsets),
        (),
        (
            num_experts,
            height,
            shrunk_PJ.shape[1],
            rank,
            *strides,
            blocks.height,
            width,
            blocks.depth,
            precision(source.dtype),
        ),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def lora_a_gradient(shrunk_PJ, source, rows, gathered, like_EjK):
    gradient = torch.empty_like(like_EjK)
    where = swapped(a_by_expert(gradient.shape, gradient.stride(), rows.offsets.shape[0] - 1))
    factor_gradient(source, shrunk_PJ, gradient, *where, None, rows, gathered)
    return gradient
