"""Token rounding's gradient: from the routing weights of rows to the scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch_kernel

TOKENS, ENTRIES = 32, 16  # of a program; a token's rows taken at a time


@triton.jit(do_not_specialize=["num_tokens"])
def rounding_gradient_kernel(
    dweights,
    scores,
    dscores,
    expert_of_row,
    token_offsets,
    token_rows,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
    NORMALISED: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write dscores where a token goes to an expert; it holds zeros elsewhere."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start = tl.load(token_offsets + token, mask=token < num_tokens, other=0)
    end = tl.load(token_offsets + token + 1, mask=token < num_tokens, other=0)
    longest = tl.max(end - start)
    line = token.to(tl.int64)[:, None] * NUM_EXPERTS
    totals = tl.zeros((TOKENS, ENTRIES), dscores.dtype.element_ty)
    products = tl.zeros((TOKENS, ENTRIES), dscores.dtype.element_ty)
    if NORMALISED:
        for first in range(0, longest, ENTRIES):
            entry = start[:, None] + first + tl.arange(0, ENTRIES)[None, :]
            is_row = entry < end[:, None]
            row = tl.load(token_rows + entry, mask=is_row, other=0)
            expert = tl.load(expert_of_row + row, mask=is_row, other=0)
            score = tl.load(scores + line + expert, mask=is_row, other=0.0)
            totals += score
            products += tl.load(dweights + row, mask=is_row, other=0.0).to(score.dtype) * score
    total, product = tl.sum(totals, axis=1), tl.sum(products, axis=1)
    divisor = tl.where(total > 0, total, 1.0) + EPSILON
    mean_gradient = tl.where(total > 0, product / divisor, 0.0)
    for first in range(0, longest, ENTRIES):
        entry = start[:, None] + first + tl.arange(0, ENTRIES)[None, :]
        is_row = entry < end[:, None]
        row = tl.load(token_rows + entry, mask=is_row, other=0)
        expert = tl.load(expert_of_row + row, mask=is_row, other=0)
        gradient = tl.load(dweights + row, mask=is_row, other=0.0).to(dscores.dtype.element_ty)
        if NORMALISED:
            gradient = (gradient - mean_gradient[:, None]) / divisor[:, None]
        tl.store(dscores + line + expert, gradient * SCALE, mask=is_row)


def round_rows_backward(dweight_P, scores_TE, expert_P, rows, weighting):
    num_tokens, num_experts = scores_TE.shape
    dscores_TE = torch.zeros(scores_TE.shape, dtype=scores_TE.dtype, device=scores_TE.device)
    if expert_P.numel():
        launch_kernel(
            rounding_gradient_kernel,
            (cdiv(num_tokens, TOKENS),),
            (
                dweight_P.contiguous(),
                scores_TE.contiguous(),
                dscores_TE,
                expert_P,
                rows.token_offsets,
                rows.token_rows,
            ),
            (num_tokens,),
            (num_experts, TOKENS, ENTRIES, *weighting),
            num_warps=4,
        )
    return dscores_TE
