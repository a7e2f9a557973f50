"""DeepSeek-V4's attention layer, computed for some queries at a time so that long sequences fit in memory.

A query sees a window of keys, and compressed keys that an indexer picks or that are all seen, in one softmax with the
sink. Projection, norm and RoPE of the queries and the first projection of the output run inside the piece too, since
heads * head_dim is eight times the hidden size. Letters as in piecewise.py; T compressed keys, W keys of a window.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..model_patches.family import modeling_module
from ..private.torch import leave_to_python
from .names import EAGER, TORCH_PIECES
from .pieces import Span, arguments_of, piece_of
from .piecewise import check_call, in_pieces, probabilities

MODULE = modeling_module("deepseek_v4")
# Picked keys are gathered where there are more than so many times as many compressed keys as a query picks. An H200 takes
# 640 ms a layer without and 659 with it at 8 times (16k tokens), 7,151 and 3,662 at 32
# (benchmarks/results/deepseek_v4_attention.csv).
GATHERED_FROM = 8


class Keys(NamedTuple):
    """Keys that the queries of a layer see, of all rows.

    near: [B, N, D] in fp32, of the tokens; the last is the last query's own. band: uint8 [B, S, W], which of the W keys
    up to its own a query sees. far: [B, T, D] in fp32, compressed. A query sees those of them that `seen`, bool [B, S,
    T], or `picked`, indices [B, S, K], -1 for none, says; all where both are None. rate: tokens of a compressed key. Keys
    are in fp32, since each piece adds to their gradients.
    """

    near: torch.Tensor
    band: torch.Tensor
    far: torch.Tensor
    seen: torch.Tensor | None
    picked: torch.Tensor | None
    rate: int

    def num_before(self, last: int) -> int:
        """Bound how many compressed keys queries before `last` see: those of tokens before them."""
        after = self.band.shape[1] - last
        return max(0, self.far.shape[1] - after // self.rate)


def attention_of(original: Callable) -> Callable:
    """Wrap DeepseekV4Attention.forward: in pieces where the config's attn_implementation is "torch_pieces"."""
    named, cache = arguments_of(original)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if self.config._attn_implementation != TORCH_PIECES:
            return original(self, *args, **kwargs)
        check_call(kwargs)
        given = named(args, kwargs)
        return _attention(self, given, given.get(cache)), None

    return forward


@leave_to_python
def _attention(self, given: dict[str, Any], cache) -> torch.Tensor:
    """Compute DeepseekV4Attention.forward, in pieces."""
    hidden = given["hidden_states"]
    cos, sin = given["position_embeddings"][self.rope_layer_type]
    residual = self.q_a_norm(self.q_a_proj(hidden))
    keys = _keys(self, given, cache, residual, (cos, sin))
    (size, num_queries), window = hidden.shape[:2], keys.band.shape[-1]
    num_far, num_picked = keys.far.shape[1], 0 if keys.picked is None else keys.picked.shape[-1]
    gathers = 0 < GATHERED_FROM * num_picked < num_far
    columns = window + (num_picked if gathers else num_far)
    # a piece sees `step` keys more than a window has
    step = min(piece_of(num_queries, self.num_heads * columns), 2 * window)

    def compute(span: Span) -> torch.Tensor:
        row, first, last = span

        def at(x):  # RoPE's angles may be of one row for all
            return x[row % x.shape[0], first:last][None]

        q = self.q_b_proj(at(residual)).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        q = _rotate(self.q_b_norm(q), at(cos), at(sin))
        out = _piece(self, q[0], keys, span, gathers)[None]
        out = _rotate(out, at(cos), -at(sin)).transpose(1, 2)
        return self.o_a_proj(out.reshape(*out.shape[:2], self.config.o_groups, -1)).flatten(2)

    return self.o_b_proj(in_pieces(compute, size, num_queries, step, 1))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return sys.modules[MODULE].apply_rotary_pos_emb(x, cos, sin)


def _keys(self, given: dict[str, Any], cache, residual: torch.Tensor, angles) -> Keys:
    hidden, band = given["hidden_states"], given["attention_mask"]
    if band is None or band.dtype != torch.uint8:
        raise ValueError(
            f"{TORCH_PIECES} takes no 4-D masks of one's own: pass the model a 2-D attention_mask, or position_ids of "
            f"packed sequences; or load it with {EAGER}"
        )
    near = self.kv_norm(self.kv_proj(hidden)).unsqueeze(1)
    near = _rotate(near, *angles)
    if cache is not None:
        near = cache.update(near, near, self.layer_idx)[0]
    near, band = near[:, 0].float(), band[:, 0].expand(hidden.shape[0], -1, -1)
    if self.compressor is None:
        return Keys(near, band, near[:, :0], None, None, 1)
    picked: list[torch.Tensor] = []
    indexer = getattr(self.compressor, "indexer", None)
    handle = None if indexer is None else indexer.register_forward_hook(lambda *call: picked.append(call[-1]))
    try:
        far, bias = self.compressor(hidden, residual, given["position_ids"], cache, self.layer_idx)
    finally:
        if handle is not None:
            handle.remove()
    seen = None if bias is None or picked else bias[:, 0] == 0
    return Keys(near, band, far[:, 0].float(), seen, picked[0] if picked else None, self.compressor.compress_rate)


def _piece(self, q: torch.Tensor, keys: Keys, span: Span, gathers: bool) -> torch.Tensor:
    """Compute attention of some queries [H, C, D] of one row: [H, C, D]."""
    row, first, last = span
    near, sees_near = _window(keys, span)
    far = keys.far[row] if gathers else keys.far[row, : keys.num_before(last)]
    near, far = near.to(q.dtype), far.to(q.dtype)
    sees_far: torch.Tensor | None
    if gathers:
        assert keys.picked is not None, "only picked keys are gathered"
        picked = keys.picked[row, first:last]
        own = F.embedding(picked.clamp(min=0), far)  # [C, K, D]; its backward adds in fp32, in one order
        scores = torch.matmul(q.transpose(0, 1), own.transpose(1, 2)).transpose(0, 1)
        sees_far = picked >= 0
    else:
        scores, sees_far = torch.matmul(q, far.t()), _seen(keys, span, far.shape[0])
    near_probs, far_probs = probabilities(
        [torch.matmul(q, near.t()).float() * self.scaling, scores.float() * self.scaling],
        [sees_near, sees_far],
        self.sinks,
        self.attention_dropout if self.training else 0.0,
    )
    near_probs, far_probs = near_probs.to(q.dtype), far_probs.to(q.dtype)
    if gathers:
        return torch.matmul(near_probs, near) + torch.matmul(far_probs.transpose(0, 1), own).transpose(0, 1)
    return torch.matmul(near_probs, near) + torch.matmul(far_probs, far)


def _window(keys: Keys, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the keys of tokens that some queries may see [N, D], and find which of them each sees, bool [C, N]."""
    row, first, last = span
    (num_queries, window), num_keys = keys.band.shape[1:], keys.near.shape[1]
    own = torch.arange(first, last, dtype=torch.int64, device=keys.band.device)[:, None] + (num_keys - num_queries)
    begin, end = max(0, first + num_keys - num_queries - window + 1), last + num_keys - num_queries
    column = torch.arange(begin, end, dtype=torch.int64, device=keys.band.device) - own + window - 1
    seen = keys.band[row, first:last].gather(1, column.clamp(0, window - 1)).bool()
    return keys.near[row, begin:end], seen & (column >= 0) & (column < window)


def _seen(keys: Keys, span: Span, num: int) -> torch.Tensor | None:
    """Find which of the first `num` compressed keys some queries see, bool [C, num], or None for all."""
    row, first, last = span
    if keys.picked is None:
        return None if keys.seen is None else keys.seen[row, first:last, :num]
    picked, num_keys = keys.picked[row, first:last], keys.far.shape[1]
    seen = torch.zeros(last - first, num_keys + 1, dtype=torch.bool, device=picked.device)
    return seen.scatter(1, torch.where(picked < 0, num_keys, picked), True)[:, :num]
