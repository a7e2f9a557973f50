"""Attention function of attn_implementation="torch_pieces": plain PyTorch, some queries at a time.

With or without sinks, for models whose keys are chosen for each query, which no kernel of torch takes. A piece is
checkpointed: backward computes its scores again. One row of a batch at a time; letters: H heads, C queries of a
piece, N keys, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from ..private import attributes
from ..private.torch import leave_to_python
from .names import EAGER, TORCH_PIECES
from .pieces import Span, piece_of
from .positions import are_packed


def probabilities(
    scores: Sequence[torch.Tensor], visible: Sequence[torch.Tensor | None], sinks: torch.Tensor | None, dropout: float
) -> tuple[torch.Tensor, ...]:
    """Take one softmax over several groups of keys and the sink, in fp32.

    Args:
        scores: of each group [H, C, N]. visible: of each group, which keys a query sees, bool [C, N], or None for all.
        sinks: [H] or None.
    Returns:
        For each group [H, C, N] in its dtype; with the sink's they add up to 1.
    """
    groups = [
        x.float() if seen is None else x.float().masked_fill(~seen, -torch.inf) for x, seen in zip(scores, visible)
    ]
    sizes = [x.shape[-1] for x in groups]
    if sinks is not None:
        groups.append(sinks.float().view(-1, 1, 1).expand(*groups[0].shape[:2], 1))
    probs = torch.cat(groups, -1).softmax(-1).to(scores[0].dtype)[..., : sum(sizes)]
    return F.dropout(probs, dropout).split(sizes, -1)


def in_pieces(compute: Callable, size: int, num_queries: int, step: int, dim: int) -> torch.Tensor:
    """Run `compute(span)`, checkpointed, for spans of `step` queries of each row, and join its results [1, ...], which
    have the queries in dimension `dim`."""

    def piece(row: int, first: int) -> torch.Tensor:
        span = Span(row, first, min(first + step, num_queries))
        if not torch.is_grad_enabled():
            return compute(span)
        return checkpoint(compute, span, use_reentrant=False)

    rows = [torch.cat([piece(row, first) for first in range(0, num_queries, step)], dim) for row in range(size)]
    return torch.cat(rows)


@leave_to_python
def attention_in_pieces(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute attention with or without sinks, for models that pass the keys of each query as indices: HY-V4, and
    MiniMax-M3, whose keys are chosen in blocks for each group of heads.

    Args:
        query: [B, H, S, D]; key: [B, H / G, T, D]; value: [B, H / G, T, D'].
        attention_mask: bool [B or 1, 1, S, T], or None where every query sees every key.
        s_aux: the sinks [H], or None. indices: [B, S, k], the keys that a query may see. block_indices: [B, G, S, k], the
            blocks of `module.indexer.block_size` keys that each of G groups of heads may see, -1 for none.
    Returns:
        ([B, S, H, D'], None).
    Raises:
        ValueError: another mask, output_attentions, or DeepSeek-V4 in a model that is not patched, or packed sequences of
            MiniMax-M3 there.
    """
    check_call(kwargs)
    if block_indices is not None and not vars(module).get(attributes.OUR_FORWARD) and are_packed(kwargs):
        raise ValueError(
            "MiniMax-M3 counts its blocks of keys from a row's start and a query's from its sequence's: patch the model "
            "(sonicmoe_hf.patch_model), which then computes packed sequences one by one"
        )
    (size, heads, num_queries, width), num_keys = query.shape, key.shape[2]
    if attention_mask is not None and (attention_mask.dtype, attention_mask.shape[-1]) != (torch.bool, num_keys):
        raise ValueError(
            f"{TORCH_PIECES} takes masks of bool [B, 1, queries, keys] here, not {attention_mask.dtype} of shape "
            f"{tuple(attention_mask.shape)}: of DeepSeek-V4 it computes models that sonicmoe_hf.patch_model patched; "
            f"others load with {EAGER}"
        )
    scale = width**-0.5 if scaling is None else scaling

    def compute(span: Span) -> torch.Tensor:
        row, first, last = span
        visible = None if attention_mask is None else attention_mask[row % attention_mask.shape[0], 0, first:last]
        if indices is not None:
            picked = indices[row, first:last].long()
            chosen = torch.zeros(last - first, num_keys, dtype=torch.bool, device=picked.device)
            chosen = chosen.scatter(1, picked, True)
            visible = chosen if visible is None else chosen & visible
        if block_indices is not None:
            blocks = block_indices[row, :, first:last]
            chosen = _keys_of_blocks(blocks, module.indexer.block_size, num_keys)
            visible = chosen if visible is None else chosen & visible
        k, v, q = key[row], value[row], query[row, :, first:last].reshape(key.shape[1], -1, width)
        if s_aux is None:
            return _without_sinks(q, k, v, visible, last - first, dropout, scale)
        scores = torch.matmul(q, k.transpose(1, 2)).view(heads, -1, num_keys).float() * scale
        (probs,) = probabilities([scores], [visible], s_aux, dropout)
        out = torch.matmul(probs.to(v.dtype).view(k.shape[0], -1, num_keys), v)
        return out.view(1, heads, last - first, -1).transpose(1, 2)

    return in_pieces(compute, size, num_queries, piece_of(num_queries, heads * num_keys), 1), None


def _keys_of_blocks(blocks: torch.Tensor, block_size: int, num_keys: int) -> torch.Tensor:
    """Find the keys in blocks [G, C, k], -1 for none: bool [G, C, N]."""
    num_blocks = -(-num_keys // block_size)
    chosen = torch.zeros(*blocks.shape[:2], num_blocks + 1, dtype=torch.bool, device=blocks.device)
    chosen = chosen.scatter(2, torch.where(blocks < 0, num_blocks, blocks), True)[..., :num_blocks]
    return chosen.repeat_interleave(block_size, -1)[..., :num_keys]


def _without_sinks(
    q, k, v, visible: torch.Tensor | None, num_queries: int, dropout: float, scale: float
) -> torch.Tensor:
    """Compute attention of q [heads of k, heads of a group * C, D] by torch's kernels: [1, C, H, D]. visible: bool
    [C, N], or [G, C, N] for each of G groups."""
    groups = k.shape[0] if visible is None or visible.dim() == 2 else visible.shape[0]
    q = q.view(groups, -1, num_queries, q.shape[-1])
    k, v = (x.view(groups, -1, *x.shape[1:]).repeat_interleave(q.shape[1] * groups // x.shape[0], 1) for x in (k, v))
    mask = None if visible is None else visible.expand(groups, -1, -1)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.reshape(1, -1, num_queries, v.shape[-1]).transpose(1, 2)


def check_call(kwargs: dict) -> None:
    """Raise ValueError for what attention in pieces does not return."""
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"{TORCH_PIECES} returns no probabilities (output_attentions=True); load the model with {EAGER}"
        )


def mask_in_pieces(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor:
    """Make a mask from the arguments of Transformers' mask functions: bool [B, 1, S, T], and under a sliding window of W
    keys alone uint8 [B, 1, S, W], of the W keys up to a query's own.

    Raises:
        ValueError: a window over a cache of a fixed size, or of a mask that is no function of indices.
    """
    if local_size is None:
        mask = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        assert mask is not None, "allow_is_causal_skip=False makes one"
        return mask
    if use_vmap or isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"{TORCH_PIECES} takes sliding windows over dynamic caches, without masks of one's own; use {EAGER}"
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    batch = torch.arange(batch_size, dtype=torch.int64, device=device).view(-1, 1, 1, 1)
    queries = torch.arange(q_length, dtype=torch.int64, device=device).view(1, 1, -1, 1) + q_offset
    keys = queries + torch.arange(1 - local_size, 1, dtype=torch.int64, device=device)
    seen = mask_function(batch, torch.zeros_like(batch[:1]), queries, keys.clamp(min=kv_offset)) & (keys >= kv_offset)
    return seen.expand(batch_size, 1, q_length, local_size).to(torch.uint8)
