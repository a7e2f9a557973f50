"""Qwen4-Exp's indexer, which picks blocks of keys for each query: the same blocks, without a loop over the queries.

Letters: B sequences, S queries, T keys, P blocks of r keys in a row, D size of an index head.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ..private.torch import leave_to_python
from .pieces import arguments_of, in_patched_models, piece_of


@in_patched_models
def without_loop(original: Callable) -> Callable:
    """Wrap Qwen4ExpTextQSAIndexer.forward, which returns the mask [B, 1, S, T] of the keys that each query sees."""
    named, cache = arguments_of(original)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = named(args, kwargs)
        mask = given["attention_mask"]
        visible = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
        valid, counts = visible.any(1), visible.sum(-1)
        if not _are_prefixes(visible, valid, counts):
            return original(self, **given)
        return _select_keys(self, given["hidden_states"], given["position_embeddings"], given[cache], valid, counts)

    return forward


@leave_to_python
def _are_prefixes(visible: torch.Tensor, valid: torch.Tensor, counts: torch.Tensor) -> bool:
    """Tell whether every query sees the first `counts` [B, S] of its sequence's valid keys [B, T], so that blocks of keys
    are the same for all queries; not so where packed sequences do not see one another."""
    ranks = valid.cumsum(-1)
    return torch.equal(visible, valid[:, None] & (ranks[:, None] <= counts[..., None]))


@leave_to_python
@torch.no_grad()
def _select_keys(self: Any, hidden_states, position_embeddings, cache, valid, counts) -> torch.Tensor:
    """Select the blocks of keys with the highest scores for each query, and the keys behind its last whole block."""
    size, num_queries, _ = hidden_states.shape
    ratio, dim, num_keys = self.compress_ratio, self.index_head_dim, valid.shape[1]
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    cos, sin = (each.expand(size, -1, -1) for each in position_embeddings)
    widths = [self.index_n_heads * dim, self.index_kv_heads * dim]
    q, keys = (
        each.reshape(size, num_queries, -1, dim) for each in self.index_qk_proj(hidden_states).split(widths, -1)
    )
    keys = keys.squeeze(2)
    q = rotate(self.q_layernorm(q), cos=cos[:, -num_queries:], sin=sin[:, -num_queries:], unsqueeze_dim=2)
    if cache is not None:
        keys = cache.update_indexer(keys, self.layer_idx)

    num_blocks = num_keys // ratio
    in_order = torch.argsort(~valid, dim=-1, stable=True)[:, : num_blocks * ratio]  # valid keys come first
    grouped = _rows(keys, in_order).view(size, num_blocks, ratio, dim)
    pooled = self.k_layernorm(grouped.float().mean(dim=2).to(keys.dtype)).unsqueeze(2)
    starts = in_order[:, ::ratio]
    blocks = rotate(pooled, cos=_rows(cos, starts), sin=_rows(sin, starts), unsqueeze_dim=2).squeeze(2)

    ranks = valid.cumsum(-1) - 1  # of keys among the valid ones, from 0
    selected = valid.new_empty(size, 1, num_queries, num_keys)
    step = piece_of(num_queries, self.index_n_heads * num_blocks + 4 * num_keys)
    for row in range(size):
        for first in range(0, num_queries, step):
            piece = slice(first, first + step)
            own = _select_keys_of_piece(self, q[row, piece], blocks[row], counts[row, piece], ranks[row])
            selected[row, 0, piece] = own & valid[row]
    return selected


def _select_keys_of_piece(self: Any, q: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor, ranks: torch.Tensor):
    """Select keys for some queries q [C, heads, D] of a sequence, by its blocks [P, D]: [C, T]."""
    ratio, num_blocks = self.compress_ratio, len(blocks)
    complete = (counts // ratio).unsqueeze(1)
    scores = torch.matmul(q.float(), blocks.float().t()).relu_().sum(1) / math.sqrt(self.index_head_dim)
    whole = torch.arange(num_blocks, dtype=torch.int64, device=q.device) < complete
    picks = scores.masked_fill_(~whole, -math.inf).topk(min(self.block_topk, num_blocks), dim=-1).indices
    picked = torch.zeros_like(whole).scatter_(1, picks, True) & whole
    by_rank = F.pad(picked.repeat_interleave(ratio, dim=1), (0, len(ranks) - num_blocks * ratio))
    rank = torch.arange(len(ranks), dtype=torch.int64, device=q.device)
    by_rank |= (rank >= complete * ratio) & (rank < counts.unsqueeze(1))
    return by_rank[:, ranks.clamp(min=0)]


def _rows(matrices: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Take rows [B, index, .] of matrices [B, T, .]."""
    return matrices.gather(1, index.unsqueeze(-1).expand(-1, -1, matrices.shape[-1]))
