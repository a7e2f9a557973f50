"""The highest scores of every token: a router's top-k.

torch.topk takes 150 to 200 us for [16384, 128] or [16384, 256] scores on an H200, more than all of dispatch: it selects
for rows of any length, and then sorts. Here a token's scores stay in registers, as integers that order like them with the
expert in their low half, and the largest is taken k times. Paper, section 5 (its own top-k sorts there).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import cdiv, launch_kernel, next_power_of_2

ELEMENTS = 2048  # scores that a program looks at


@triton.jit
def order_key(score):
    """fp32 scores as int32 that order as they do; -0.0 and 0.0 tie. NaNs are above or below all else, by their sign."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where((bits & 0x7FFFFFFF) == 0, 0, key)


@triton.jit(do_not_specialize=["num_tokens"])
def top_k_kernel(
    scores,
    index,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)[None, :]
    is_score = (token < num_tokens)[:, None] & (expert < NUM_EXPERTS)
    at = token.to(tl.int64)[:, None] * NUM_EXPERTS + expert
    score = tl.load(scores + at, mask=is_score, other=0.0).to(tl.float32)
    key = order_key(score)
    key = tl.where(score != score, 0x7FFFFFFF, key)  # NaN is the largest, as for torch.topk
    taken: tl.constexpr = -0x7FFFFFFFFFFFFFFF
    left = tl.where(is_score, (key.to(tl.int64) << 32) | (EXPERTS - 1 - expert), taken)
    for k in tl.static_range(TOP_K):
        best = EXPERTS - 1 - (tl.max(left, axis=1) & 0xFFFFFFFF)
        tl.store(index + token.to(tl.int64) * TOP_K + k, best, mask=token < num_tokens)
        left = tl.where(expert == best[:, None], taken, left)


def top_k(scores_NE, k):
    """int64 [N, k]: the experts of every row's k highest scores, highest first, of equal ones the lower expert first.

    E is at most ELEMENTS, and k steps are compiled, so both are to be small.
    """
    scores_NE = scores_NE.contiguous()
    num_rows, num_experts = scores_NE.shape
    index = torch.empty(num_rows, k, dtype=torch.int64, device=scores_NE.device)
    experts = next_power_of_2(num_experts)
    tokens = ELEMENTS // experts
    if index.numel():
        launch_kernel(
            top_k_kernel,
            (cdiv(num_rows, tokens),),
            (scores_NE, index),
            (num_rows,),
            (num_experts, experts, k, tokens),
            num_warps=4,
        )
    return index
