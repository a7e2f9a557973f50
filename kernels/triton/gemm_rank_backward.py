"""The gradients of a low-rank adapter's B and of the rows of rank r, which one pass over the wide side gives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..low_rank import b_by_expert
from .config import blocks_for
from .gemm_common import precision
from .gemm_rank import factor_gradient, fp32_bits, lora_shrink, rank_columns
from .launch import cdiv, launch_kernel
from .reorder import ENTRIES, reorder_in_turn, reorder_job

ONE_PASS_RANK = 32  # beyond it, partial sums of dv and du cost more than reading the wide side again
SUMMED = 1024  # entries of dshrunk that a program of reorder_and_sum_kernel computes


@triton.jit(do_not_specialize=["num_pairs", "scale_bits"])
def gemm_rank_backward_kernel(
    source,
    factor,
    dshrunk,
    shrunk,
    gradient,
    routing_weight,
    token,
    pair,
    offsets,
    num_pairs,
    scale_bits,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    J: tl.constexpr,
    R: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr,
    FACTOR_STRIDE_N: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_R: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute dB of WIDTH columns of `source`, and what these columns add to dshrunk (dv, du), from one read of them:
    dshrunk [slices, P, J], to be summed, or dshrunk itself where one slice has every column. Experts of a slice come
    one after the other, so that rows which several experts gather are read from L2."""
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
        partial = tl.dot(wide, right, input_precision=PRECISION)
        product = tl.dot(tl.trans(wide), rows_j, product, input_precision=PRECISION)
        if N <= WIDTH:
            partial *= scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(out + entry, partial.to(dshrunk.dtype.element_ty), mask=is_entry)
    tl.store(
        gradient + expert.to(tl.int64) * STRIDE_E + n[:, None].to(tl.int64) * STRIDE_N + j[None, :] * STRIDE_R,
        product.to(gradient.dtype.element_ty),
        mask=is_column[:, None] & (j < R)[None, :],
    )


@triton.jit(do_not_specialize=["num_pairs", "scale_bits"])
def reorder_and_sum_kernel(
    gradient,
    reordered,
    partials,
    dshrunk,
    num_pairs,
    scale_bits,
    SLICES: tl.constexpr,
    J: tl.constexpr,
    SUMMED: tl.constexpr,
    JOB: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Write dB in its own order, unless `reordered` is None; and dshrunk [P, J] = scale * the sum of partials [SLICES, P,
    J] over slices, unless `partials` is None. Rows past the last are sums of whatever lies there, and nobody reads
    them."""
    tile = reorder_in_turn(gradient, reordered, tl.program_id(0), JOB, ENTRIES)
    if partials is not None:  # noqa: SIM102  (known when it is compiled)
        if tile >= 0:
            size = num_pairs.to(tl.int64) * J
            entry = tile.to(tl.int64) * SUMMED + tl.arange(0, SUMMED)
            is_there = entry < size
            total = tl.zeros((SUMMED,), tl.float32)
            for slice in tl.static_range(SLICES):
                total += tl.load(partials + slice * size + entry, mask=is_there, other=0.0)
            total *= scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
            tl.store(dshrunk + entry, total.to(dshrunk.dtype.element_ty), mask=is_there)


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
    reordered_size = cdiv(num_experts * size * rank, 4) * 4 if is_reordered else 0  # a multiple of 16 bytes
    partials_size = slices * num_pairs * padded if slices > 1 else 0
    gradient, partials = result, None
    if reordered_size + partials_size:
        scratch = torch.empty(reordered_size + partials_size, dtype=torch.float32, device=source.device)
        gradient = scratch if is_reordered else result
        partials = scratch[reordered_size:] if partials_size else None
    dshrunk_PJ = None
    if is_one_pass:
        dshrunk_PJ = torch.empty_like(shrunk_PJ)
        by_expert, by_row, by_rank = b_ENJ.stride()
        sums, token = dshrunk_PJ if partials is None else partials, rows.token if gathered else None
        launch_kernel(
            gemm_rank_backward_kernel,
            (slices * num_experts,),
            (source, b_ENJ, sums, shrunk_PJ, gradient, weight_P, token, rows.pair, rows.offsets),
            (num_pairs, fp32_bits(scale)),
            (
                num_experts,
                size,
                padded,
                rank,
                by_expert,
                by_rank,
                by_row,
                *written,
                blocks.height,
                rank_columns(padded, ONE_PASS_RANK),
                blocks.depth,
                precision(source.dtype),
            ),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    else:
        if want_dshrunk:
            dshrunk_PJ = lora_shrink(source, b_ENJ, rows, scale, gathered)
        factor_gradient(source, shrunk_PJ, gradient, shape_ENr, written, weight_P, rows, gathered)
    tiles = (job[-1] if job else 0) + cdiv(partials_size // slices, SUMMED)
    if tiles:
        launch_kernel(
            reorder_and_sum_kernel,
            (tiles,),
            (gradient, result if is_reordered else None, partials, dshrunk_PJ),
            (num_pairs, fp32_bits(scale)),
            (slices, padded, SUMMED, job, ENTRIES),
            num_warps=4,
        )
    return dshrunk_PJ, result
