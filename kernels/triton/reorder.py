"""Factors of rank r from PEFT's order to that of the kernels and back: cast, transposed and padded in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import cdiv, launch_kernel, next_power_of_2

ENTRIES = 64  # (n, j) of a tile; beside up to EXPERTS experts
EXPERTS = 32
JOBS = 4  # of one launch, at most


@triton.jit
def _reorder_tile(source, out, tile, JOB: tl.constexpr, ENTRIES: tl.constexpr):
    """Compute out[e, n, j] = source[e, n, j], and 0 for j >= R, of one tile; JOB is a `reorder_job`. Where experts lie
    closest on one side, and j (RANK_LAST) or n on the other, a tile is read along the one and written along the other.
    """
    NUM_EXPERTS: tl.constexpr = JOB[0]
    N: tl.constexpr = JOB[1]
    R: tl.constexpr = JOB[2]
    J: tl.constexpr = JOB[3]
    RANK_LAST: tl.constexpr = JOB[10]
    EXPERTS: tl.constexpr = JOB[11]
    column_tiles: tl.constexpr = (NUM_EXPERTS + EXPERTS - 1) // EXPERTS
    entry = tile // column_tiles * ENTRIES + tl.arange(0, ENTRIES)
    expert = (tile % column_tiles * EXPERTS + tl.arange(0, EXPERTS))[None, :].to(tl.int64)
    if RANK_LAST:
        n, j = entry // J, entry % J
    else:
        n, j = entry % N, entry // N
    is_there = (entry < N * J)[:, None] & (expert < NUM_EXPERTS)
    n, j = n.to(tl.int64)[:, None], j[:, None]
    value = tl.load(source + expert * JOB[4] + n * JOB[5] + j * JOB[6], mask=is_there & (j < R), other=0.0)
    tl.store(out + expert * JOB[7] + n * JOB[8] + j * JOB[9], value.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def reorder_in_turn(source, out, tile, JOB: tl.constexpr, ENTRIES: tl.constexpr):
    """Run `_reorder_tile` if `tile` is one of this job's. Returns the tile's number as the next job counts it. Without
    `out` there is no job."""
    if out is not None:
        tiles: tl.constexpr = JOB[12]
        if (tile >= 0) & (tile < tiles):
            _reorder_tile(source, out, tile, JOB, ENTRIES)
        tile -= tiles
    return tile


@triton.jit
def reorder_kernel(
    source_0,
    out_0,
    source_1,
    out_1,
    source_2,
    out_2,
    source_3,
    out_3,
    JOB_0: tl.constexpr,
    JOB_1: tl.constexpr,
    JOB_2: tl.constexpr,
    JOB_3: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Run `_reorder_tile` of every tile of every job."""
    tile = tl.program_id(0)
    tile = reorder_in_turn(source_0, out_0, tile, JOB_0, ENTRIES)
    tile = reorder_in_turn(source_1, out_1, tile, JOB_1, ENTRIES)
    tile = reorder_in_turn(source_2, out_2, tile, JOB_2, ENTRIES)
    reorder_in_turn(source_3, out_3, tile, JOB_3, ENTRIES)


def reorder_job(source_shape, source_strides, out_shape, out_strides):
    """Make a job's constants: E, N, R, J, the strides of the source and of the result, RANK_LAST, experts of a tile,
    number of tiles."""
    num_experts, size, rank = source_shape
    padded = out_shape[2]
    experts = min(next_power_of_2(num_experts), EXPERTS)
    by_experts = out_strides if source_strides[0] == 1 and num_experts > 1 else source_strides
    tiles = cdiv(size * padded, ENTRIES) * cdiv(num_experts, experts)
    return num_experts, size, rank, padded, *source_strides, *out_strides, by_experts[2] == 1, experts, tiles


def reorder(*tensors, jobs):
    sources_and_results = zip(jobs[::2], jobs[1::2], strict=True)
    constants = [reorder_job(*source, *out) for (_, *source), (_, *out) in sources_and_results]
    tiles = sum(job[-1] for job in constants)
    constants += [None] * (JOBS - len(constants))
    tensors += (None,) * (2 * JOBS - len(tensors))
    launch_kernel(reorder_kernel, (tiles,), tensors, (), (*constants, ENTRIES), num_warps=4)
