"""Rows back to tokens: a gather-sum in fp32, in the routing's order, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import cdiv, launch_kernel, next_power_of_2

MAX_ROWS_PER_STEP = 4  # of a token, loaded together
COLUMNS = 512  # of a program
THREAD_BYTES = 32  # of a row, that a thread loads


@triton.jit
def combine_kernel(
    y,
    weight,
    out,
    offsets,
    token_offsets,
    token_rows,
    pair,
    H: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS_PER_STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add each token's weighted rows one by one, so that no value changes threads; a token's programs run side by
    side."""
    column_blocks: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    num_rows = tl.load(offsets + NUM_EXPERTS)
    start = tl.load(token_offsets + token)
    end = tl.load(token_offsets + token + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start, end, ROWS_PER_STEP):
        for entry in tl.static_range(ROWS_PER_STEP):
            row = tl.load(token_rows + first + entry, mask=first + entry < end, other=num_rows)
            is_row = row < num_rows
            value = tl.load(y + row.to(tl.int64) * H + column, mask=is_row & (column < H), other=0.0).to(tl.float32)
            if weight is not None:
                value *= tl.load(weight + tl.load(pair + row, mask=is_row, other=0), mask=is_row, other=0.0)
            total += value
    tl.store(out + token.to(tl.int64) * H + column, total.to(out.dtype.element_ty), mask=column < H)


def combine(y_RH, weight_P, rows, num_tokens):
    num_rows, hidden = y_RH.shape
    if not num_rows or not num_tokens:
        return y_RH.new_zeros(num_tokens, hidden)
    out_TH = y_RH.new_empty(num_tokens, hidden)
    rows_of_token = cdiv(num_rows, num_tokens)
    rows_per_step = min(next_power_of_2(rows_of_token), MAX_ROWS_PER_STEP)
    columns = min(next_power_of_2(hidden), COLUMNS)
    warps = max(columns * y_RH.element_size() // (32 * THREAD_BYTES), 1)
    if weight_P is not None and rows_of_token <= MAX_ROWS_PER_STEP:
        columns = min(next_power_of_2(hidden), 2 * COLUMNS)  # one step, too little for what finding the weights takes
    launch_kernel(
        combine_kernel,
        (num_tokens * cdiv(hidden, columns),),
        (y_RH, weight_P, out_TH, rows.offsets, rows.token_offsets, rows.token_rows, rows.pair),
        constants=(hidden, rows.offsets.shape[0] - 1, rows_per_step, columns),
        num_warps=warps,
    )
    return out_TH
