"""Bias gradients: sums over an expert's rows. An expert without rows gets zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch_kernel, next_power_of_2

PROGRAMS_WANTED = 1024  # enough small programs to fill any GPU several times over


@triton.jit
def bias_gradient_kernel(
    source,
    routing_weight,
    sums,
    token,
    pair,
    offsets,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute sums[s, e], the sum of the s-th of SPLITS equal runs of expert e's rows; with routing weights, rows are
    gathered by token."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    rows_of_split = tl.cdiv(end - start, SPLITS)
    start += rows_of_split * tl.program_id(2)
    end = tl.minimum(end, start + rows_of_split)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_read = (row < end)[:, None] & (column < N)[None, :]
        if routing_weight is None:
            value = tl.load(source + row.to(tl.int64)[:, None] * N + column[None, :], mask=is_read, other=0.0)
            total += value.to(tl.float32)
        else:
            gathered = tl.load(token + row, mask=row < end, other=0).to(tl.int64)[:, None]
            routed = tl.load(routing_weight + tl.load(pair + row, mask=row < end, other=0), mask=row < end, other=0.0)
            value = tl.load(source + gathered * N + column[None, :], mask=is_read, other=0.0)
            total += routed[:, None] * value.to(tl.float32)
    offset = (tl.program_id(2) * tl.num_programs(0) + expert).to(tl.int64) * N + column
    tl.store(sums + offset, tl.sum(total, axis=0), mask=column < N)


def _bias_gradient(source, weight_P, rows, like_EN):
    num_experts, columns = like_EN.shape
    column_tiles = cdiv(columns, 128)
    splits = min(next_power_of_2(cdiv(PROGRAMS_WANTED, max(num_experts * column_tiles, 1))), 64)
    sums = torch.empty(splits, num_experts, columns, dtype=torch.float32, device=source.device)
    launch_kernel(
        bias_gradient_kernel,
        (num_experts, column_tiles, splits),
        (source, weight_P, sums, rows.token, rows.pair, rows.offsets),
        (),
        (columns, splits, 16, 128),
        num_warps=4,
    )
    return torch.empty_like(like_EN).copy_(sums.sum(0))


def gate_up_bias_gradient(dh_R2I, rows, like_E2I):
    return _bias_gradient(dh_R2I, None, rows, like_E2I)


def down_bias_gradient(dout_TH, weight_P, rows, like_EH):
    return _bias_gradient(dout_TH, weight_P, rows, like_EH)
