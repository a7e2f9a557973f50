"""Rows back to tokens: a gather-sum in fp32, in the routing's order, without atomics."""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .launch import SIZES, Prepared, cdiv, next_power_of_2

MOST_ROWS_AT_ONCE = 8
COLUMNS = 512


@triton.jit
def combine_kernel(
    y, weight, out, offsets, token_offsets, token_rows, pair,
    H: tl.constexpr, NUM_EXPERTS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_rows = tl.load(offsets + NUM_EXPERTS)
    start = tl.load(token_offsets + token)
    end = tl.load(token_offsets + token + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start, end, AT_ONCE):
        entry = first + tl.arange(0, AT_ONCE)
        row = tl.load(token_rows + entry, mask=entry < end, other=num_rows)
        is_row = row < num_rows
        values = tl.load(
            y + row.to(tl.int64)[:, None] * H + column[None, :],
            mask=is_row[:, None] & (column < H)[None, :],
            other=0.0,
        ).to(tl.float32)
        if weight is not None:
            routed = tl.load(weight + tl.load(pair + row, mask=is_row, other=0), mask=is_row, other=0.0)
            values *= routed[:, None]
        total += tl.sum(values, axis=0)
    tl.store(out + token.to(tl.int64) * H + column, total.to(out.dtype.element_ty), mask=column < H)


@functools.lru_cache(maxsize=SIZES)
def _prepared(device, dtype, weighted, num_rows, hidden, num_tokens, num_experts):
    at_once = min(next_power_of_2(cdiv(num_rows, num_tokens)), MOST_ROWS_AT_ONCE)
    columns = min(next_power_of_2(hidden), COLUMNS)
    warps = max(columns * dtype.itemsize // (32 * 16), 1)  # 16 bytes a thread: no two threads share a column
    return Prepared(
        combine_kernel, device, (num_tokens, cdiv(hidden, columns)),
        constants=(hidden, num_experts, at_once, columns), num_warps=warps,
    )  # fmt: skip


def combine(y_RH, weight_P, rows, num_tokens):
    num_rows, hidden = y_RH.shape
    if not num_rows:
        return y_RH.new_zeros(num_tokens, hidden)
    out_TH = y_RH.new_empty(num_tokens, hidden)
    launch = _prepared(
        y_RH.get_device(), y_RH.dtype, weight_P is None, num_rows, hidden, num_tokens, rows.offsets.shape[0] - 1
    )
    launch(y_RH, weight_P, out_TH, rows.offsets, rows.token_offsets, rows.token_rows, rows.pair)
    return out_TH
