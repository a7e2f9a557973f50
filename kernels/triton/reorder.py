"""Factors of rank r from PEFT's order to that of the kernels and back: cast, transposed and padded in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import cdiv, launch_kernel, next_power_of_2

ENTRIES = 64  # (n, j) of a tile; beside up to EXPERTS experts
EXPERTS = 32


@triton.jit
def reorder_kernel(
    source, out,
    NUM_EXPERTS: tl.constexpr, N: tl.constexpr, R: tl.constexpr, J: tl.constexpr, SOURCE_E: tl.constexpr,
    SOURCE_N: tl.constexpr, SOURCE_R: tl.constexpr, OUT_E: tl.constexpr, OUT_N: tl.constexpr, OUT_J: tl.constexpr,
    RANK_LAST: tl.constexpr, ENTRIES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """out[e, n, j] = source[e, n, j], and 0 for j >= R. On one side experts lie closest, on the other j (RANK_LAST) or n:
    a tile is read along the one and written along the other."""
    column_tiles: tl.constexpr = (NUM_EXPERTS + EXPERTS - 1) // EXPERTS
    entry = tl.program_id(0) // column_tiles * ENTRIES + tl.arange(0, ENTRIES)
    expert = (tl.program_id(0) % column_tiles * EXPERTS + tl.arange(0, EXPERTS))[None, :].to(tl.int64)
    if RANK_LAST:
        n, j = entry // J, entry % J
    else:
        n, j = entry % N, entry // N
    is_there = (entry < N * J)[:, None] & (expert < NUM_EXPERTS)
    n, j = n.to(tl.int64)[:, None], j[:, None]
    source_entry = source + expert * SOURCE_E + n * SOURCE_N + j * SOURCE_R
    value = tl.load(source_entry, mask=is_there & (j < R), other=0.0)
    tl.store(out + expert * OUT_E + n * OUT_N + j * OUT_J, value.to(out.dtype.element_ty), mask=is_there)


def reorder(source_ENj, out_ENJ):
    num_experts, size, rank = source_ENj.shape
    padded = out_ENJ.shape[2]
    if num_experts == 1 or (source_ENj.stride(0) == 1) == (out_ENJ.stride(0) == 1):
        if rank < padded:
            out_ENJ[:, :, rank:] = 0
            out_ENJ = out_ENJ[:, :, :rank]
        out_ENJ.copy_(source_ENj)
        return
    other = out_ENJ if source_ENj.stride(0) == 1 else source_ENj
    experts = min(next_power_of_2(num_experts), EXPERTS)
    launch_kernel(
        reorder_kernel, (cdiv(size * padded, ENTRIES) * cdiv(num_experts, experts),), (source_ENj, out_ENJ), (),
        (num_experts, size, rank, padded, *source_ENj.stride(), *out_ENJ.stride(), other.stride(2) == 1, ENTRIES,
         experts),
        num_warps=4,
    )  # fmt: skip
