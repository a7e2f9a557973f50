"""Weight gradients: sums over an expert's rows of an outer product. An expert without rows gets zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .config import blocks_for
from .descriptors import row_descriptor
from .gemm_common import precision, swizzle
from .launch import cdiv, launch_kernel


@triton.jit
def _add_rows(
    product,
    direct,
    gathered,
    token,
    first,
    end,
    m,
    n,
    M: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add gathered[token[r]]^T direct[r] over DEPTH rows from `first` to a product, through pointers."""
    row = first + tl.arange(0, DEPTH)
    is_left = (m < M)[None, :]
    is_right = (n < N)[None, :]
    if MASKED:  # on both sides: a row past the end may hold NaN
        is_left &= (row < end)[:, None]
        is_right &= (row < end)[:, None]
        source = tl.load(token + row, mask=row < end, other=0)
    else:
        source = tl.load(token + row)
    left = tl.load(gathered + source.to(tl.int64)[:, None] * M + m[None, :], mask=is_left, other=0.0)
    right = tl.load(direct + row.to(tl.int64)[:, None] * N + n[None, :], mask=is_right, other=0.0)
    return tl.dot(tl.trans(left), right, product, input_precision=PRECISION)


@triton.jit
def _add_described_rows(
    product, direct, gathered, token, first, m, first_n, M: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the same of DEPTH rows that the expert has in full, with `direct` a descriptor, whose loads know no mask."""
    source = tl.load(token + first + tl.arange(0, DEPTH)).to(tl.int64)[:, None]
    left = tl.load(gathered + source * M + m[None, :], mask=(m < M)[None, :], other=0.0)
    right = direct.load([first, first_n])
    return tl.dot(tl.trans(left), right, product, input_precision=PRECISION)


@triton.jit
def gemm_wgrad_kernel(
    direct,
    described,
    gathered,
    out,
    token,
    offsets,
    M: tl.constexpr,
    N: tl.constexpr,
    STRIDE_E: tl.constexpr,
    STRIDE_M: tl.constexpr,
    STRIDE_N: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    RASTER: tl.constexpr,
    PEEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute out[e] = sum over the rows r of e of gathered[token[r]]^T direct[r]. `described`: a tensor descriptor of
    `direct` that its full depths are read through, or None."""
    HIGH: tl.constexpr = (M + HEIGHT - 1) // HEIGHT
    WIDE: tl.constexpr = (N + WIDTH - 1) // WIDTH
    expert = tl.program_id(0) // (HIGH * WIDE)
    high, wide = swizzle(tl.program_id(0) % (HIGH * WIDE), HIGH, WIDE, RASTER)
    m = high * HEIGHT + tl.arange(0, HEIGHT)
    n = wide * WIDTH + tl.arange(0, WIDTH)
    start = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    product = tl.zeros((HEIGHT, WIDTH), tl.float32)
    if PEEL or described is not None:
        full = start + (end - start) // DEPTH * DEPTH
        for first in range(start, full, DEPTH):
            if described is not None:
                product = _add_described_rows(
                    product, described, gathered, token, first, m, wide * WIDTH, M, DEPTH, PRECISION
                )
            else:
                product = _add_rows(product, direct, gathered, token, first, end, m, n, M, N, DEPTH, False, PRECISION)
        start = full
    for first in range(start, end, DEPTH):
        product = _add_rows(product, direct, gathered, token, first, end, m, n, M, N, DEPTH, True, PRECISION)
    tl.store(
        out + expert.to(tl.int64) * STRIDE_E + m[:, None].to(tl.int64) * STRIDE_M + n[None, :].to(tl.int64) * STRIDE_N,
        product.to(out.dtype.element_ty),
        mask=(m < M)[:, None] & (n < N)[None, :],
    )


def _weight_gradient(direct_RN, gathered_TM, rows, like_ENM):
    """Compute the sum over rows of direct^T gathered[token], in the strides of `like_ENM`.

    The gathered side is the shorter side of a tile: threads spend instructions on what is gathered, and none on the rest.
    """
    gradient = torch.empty_like(like_ENM)
    num_experts, width, height = like_ENM.shape
    blocks = blocks_for("gradient", direct_RN, rows.token.numel(), num_experts)
    described = (
        row_descriptor(direct_RN, blocks.depth, blocks.width) if blocks.descriptors and rows.token.numel() else None
    )
    launch_kernel(
        gemm_wgrad_kernel,
        (num_experts * cdiv(height, blocks.height) * cdiv(width, blocks.width),),
        (direct_RN, described, gathered_TM, gradient, rows.token, rows.offsets),
        (),
        (
            height,
            width,
            *gradient.transpose(1, 2).stride(),
            blocks.height,
            blocks.width,
            blocks.depth,
            blocks.raster,
            blocks.peel,
            precision(direct_RN.dtype),
        ),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return gradient


def gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH):
    return _weight_gradient(dh_R2I, x_TH, rows, like_E2IH)


def down_gradient(dout_TH, a_RI, rows, like_EHI):
    return _weight_gradient(a_RI, dout_TH, rows, like_EHI.transpose(1, 2)).transpose(1, 2)
