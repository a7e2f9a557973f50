"""Gradients of weights and biases: sums over an expert's rows. An expert without rows gets zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import blocks_for
from .rows import precision

PROGRAMS_WANTED = 1024  # enough small programs to fill any GPU several times over


@triton.jit
def weight_gradient_kernel(
    left, right, out, token, offsets,
    M: tl.constexpr, N: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_M: tl.constexpr, STRIDE_N: tl.constexpr,
    GATHER_LEFT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows r of e of left[r]^T right[r]; the gathered side is read at token[r]."""
    HIGH: tl.constexpr = tl.cdiv(M, HEIGHT)
    WIDE: tl.constexpr = tl.cdiv(N, WIDTH)
    expert = tl.program_id(0) // (HIGH * WIDE)
    place = tl.program_id(0) % (HIGH * WIDE)
    m = place % HIGH * HEIGHT + tl.arange(0, HEIGHT)
    n = place // HIGH * WIDTH + tl.arange(0, WIDTH)
    is_m = (m < M)[None, :]
    is_n = (n < N)[None, :]
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    product = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for first in range(start, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        is_row = (row < end)[:, None]  # both sides: a row past the end may hold NaN
        gathered = tl.load(token + row, mask=row < end, other=0).to(tl.int64)[:, None]
        row = row.to(tl.int64)[:, None]
        if GATHER_LEFT:
            a = tl.load(left + gathered * M + m[None, :], mask=is_row & is_m, other=0.0)
            b = tl.load(right + row * N + n[None, :], mask=is_row & is_n, other=0.0)
        else:
            a = tl.load(left + row * M + m[None, :], mask=is_row & is_m, other=0.0)
            b = tl.load(right + gathered * N + n[None, :], mask=is_row & is_n, other=0.0)
        product = tl.dot(tl.trans(a), b, product, input_precision=PRECISION)
    tl.store(
        out + expert.to(tl.int64) * STRIDE_E + m[:, None].to(tl.int64) * STRIDE_M + n[None, :].to(tl.int64) * STRIDE_N,
        product.to(out.dtype.element_ty), mask=(m < M)[:, None] & is_n,
    )  # fmt: skip


@triton.jit
def bias_gradient_kernel(
    source, routing_weight, sums, token, pair, offsets,
    N: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """sums[s, e] = the s-th share of expert e's rows, summed; with weights the rows are gathered by token."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    share = tl.cdiv(end - start, SPLITS)
    start += share * tl.program_id(2)
    end = tl.minimum(end, start + share)
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
    place = (tl.program_id(2) * tl.num_programs(0) + expert).to(tl.int64) * N + column
    tl.store(sums + place, tl.sum(total, axis=0), mask=column < N)


def _weight_gradient(direct_RM, gathered_TN, rows, like_EMN):
    """sum over rows of direct^T gathered[token], in the strides of `like_EMN`."""
    gradient = torch.empty_like(like_EMN)
    num_experts, height, width = like_EMN.shape
    sides, view = (direct_RM, gathered_TN), gradient
    gather_left = gradient.stride(2) != 1  # stored transposed: computed so, that stores run along memory
    if gather_left:
        sides, view, height, width = sides[::-1], gradient.transpose(1, 2), width, height
    blocks = blocks_for("gradient", direct_RM, rows.token.numel(), num_experts)
    weight_gradient_kernel[(num_experts * triton.cdiv(height, blocks.height) * triton.cdiv(width, blocks.width),)](
        *sides, view, rows.token, rows.offsets, height, width, *view.stride(), gather_left,
        blocks.height, blocks.width, blocks.depth, precision(direct_RM),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return gradient


def gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH):
    return _weight_gradient(dh_R2I, x_TH, rows, like_E2IH)


def down_gradient(dout_TH, a_RI, rows, like_EHI):
    return _weight_gradient(a_RI, dout_TH, rows, like_EHI.transpose(1, 2)).transpose(1, 2)


def _bias_gradient(source, weight_P, rows, like_EN):
    num_experts, columns = like_EN.shape
    column_tiles = triton.cdiv(columns, 128)
    splits = min(triton.next_power_of_2(triton.cdiv(PROGRAMS_WANTED, max(num_experts * column_tiles, 1))), 64)
    sums = torch.empty(splits, num_experts, columns, dtype=torch.float32, device=source.device)
    bias_gradient_kernel[(num_experts, column_tiles, splits)](
        source, weight_P, sums, rows.token, rows.pair, rows.offsets, columns, splits, ROWS=16, COLUMNS=128, num_warps=4
    )
    return torch.empty_like(like_EN).copy_(sums.sum(0))


def gate_up_bias_gradient(dh_R2I, rows, like_E2I):
    return _bias_gradient(dh_R2I, None, rows, like_E2I)


def down_bias_gradient(dout_TH, weight_P, rows, like_EH):
    return _bias_gradient(dout_TH, weight_P, rows, like_EH)
