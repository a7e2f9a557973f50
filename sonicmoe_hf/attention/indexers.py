"""Indexers of sparse attention, which choose keys for each query, in pieces of queries.

Transformers scores every query with every key at once, in fp32 and once a head: [B, S, index heads, T]. Here their own
forward runs for some queries at a time, so that the same keys are picked. B sequences, S queries, T keys.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..model_patches.family import modeling_module
from ..private import attributes
from ..private.replaced import replace
from ..private.torch import leave_to_python
from .boundaries import one_by_one
from .deepseek_v4 import attention_of
from .pieces import Span, arguments_of, cut, fits, in_patched_models, piece_of
from .pooled_indexer import without_loop

PICKING = {  # module -> its indexer of DeepSeek's sparse attention, whose forward picks keys among those of a mask
    modeling_module(folder): name
    for folder, name in (
        ("deepseek_v32", "DeepseekV32Indexer"),
        ("glm_moe_dsa", "GlmMoeDsaIndexer"),
        ("hy_v4", "HYV4Indexer"),
        ("hy_v4_vl", "HYV4VLIndexer"),
        ("mistral_large4", "MistralLarge4TextIndexer"),
        ("axk2", "AXK2Indexer"),
        ("dots3_note", "Dots3NoteTextIndexer"),
    )
}
V4, QWEN4, M3 = (modeling_module(folder) for folder in ("deepseek_v4", "qwen4_exp", "minimax_m3_vl"))


def use_our_forwards(model: nn.Module) -> None:
    """Wrap the forwards of a model's indexers, and of its attentions that count keys from a row's start, in ours: in
    pieces of queries, without a loop, or on one sequence after the other. The classes stay wrapped."""
    ours: dict[type, Callable] = dict(_classes())
    for module in model.modules():
        if type(module) in ours:
            replace(type(module), "forward", ours[type(module)](type(module).forward))
            setattr(module, attributes.OUR_FORWARD, True)


def leave_our_forwards(model: nn.Module) -> None:
    """Undo `use_our_forwards`; the classes stay wrapped, and run their own forward in this model."""
    for module in model.modules():
        vars(module).pop(attributes.OUR_FORWARD, None)


def _classes() -> Iterator[tuple[type, Callable]]:
    """Yield the classes of indexers and attentions whose modules were imported, and the function that wraps their
    forward."""
    every = [(module, name, _picking) for module, name in PICKING.items()]
    every += [(V4, "DeepseekV4Indexer", _without_gradients), (V4, "DeepseekV4IndexerScorer", _scoring)]
    every += [(V4, "DeepseekV4Attention", lambda original: one_by_one(attention_of(original)))]
    every += [(M3, "MiniMaxM3VLAttention", one_by_one)]
    every += [(QWEN4, "Qwen4ExpTextQSAIndexer", without_loop), (M3, "MiniMaxM3VLIndexer", _picking_blocks)]
    for module, name, wrap in every:
        if (cls := getattr(sys.modules.get(module), name, None)) is not None:
            yield cls, wrap


@in_patched_models
def _picking(original: Callable) -> Callable:
    """Wrap a forward that returns the indices [B, S, k] of the keys with the highest scores."""
    named, cache = arguments_of(original)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = named(args, kwargs)
        mask, (size, num_queries, _) = given["attention_mask"], given["hidden_states"].shape
        if mask.shape[1:-1] != (num_queries,):
            return original(self, **given)
        num_keys = mask.shape[-1]
        if given.get(cache) is None and num_keys <= self.index_topk:
            every = torch.arange(num_keys, dtype=torch.int32, device=mask.device)
            return every.expand(size, num_queries, num_keys)
        if fits(size * num_queries, self.n_heads * num_keys):
            return original(self, **given)
        key_cache = given.get(cache)
        update = None if key_cache is None else lambda keys: key_cache.update_indexer(keys, self.layer_idx)
        return _in_pieces(self, original, given, cache, update, piece_of(num_queries, self.n_heads * num_keys))

    return forward


@in_patched_models
def _picking_blocks(original: Callable) -> Callable:
    """Wrap MiniMaxM3VLIndexer.forward, which returns indices [B, heads, S, k] of blocks of keys; each layer of its cache
    holds keys [B, 1, T, D]."""
    named, cache = arguments_of(original)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = named(args, kwargs)
        size, num_queries, _ = given["hidden_states"].shape
        layer = None if given[cache] is None else given[cache].layers[self.layer_idx]
        num_cached = 0 if layer is None or layer.idx_keys is None else layer.idx_keys.shape[2]
        scores = self.num_heads * (num_queries + num_cached)
        if fits(size * num_queries, scores):
            return original(self, **given)
        update = None if layer is None else layer.update_index
        return _in_pieces(self, original, given, cache, update, piece_of(num_queries, scores), dim=2)

    return forward


@leave_to_python
@torch.no_grad()
def _in_pieces(
    self, original: Callable, given: dict[str, Any], cache: str, update: Callable | None, step: int, dim: int = 1
) -> torch.Tensor:
    """Run an indexer for `step` queries of a sequence at a time, after its keys were made.

    cache: the argument's name. update: adds the new keys to a cache, and returns those of all tokens. dim: of tokens in
        keys, and of queries in what is picked.
    """
    size, num_queries = given["hidden_states"].shape[:2]
    spans = [Span(row, first, first + step) for row in range(size) for first in range(0, num_queries, step)]

    def join(pieces: list[torch.Tensor]) -> torch.Tensor:
        per_row = len(spans) // size
        return torch.cat([torch.cat(pieces[first : first + per_row], dim) for first in range(0, len(spans), per_row)])

    made: list[torch.Tensor] = []
    for span in spans:
        piece = cut(given, span)
        if "attention_mask" in piece:
            piece["attention_mask"] = piece["attention_mask"][..., : piece["hidden_states"].shape[1]]
        else:  # positions of blocks, which a piece's own keys may not reach
            piece["position_ids"] = torch.zeros_like(piece["position_ids"])
        original(self, **{**piece, cache: _KeyCache(made.append)})
    keys = join(made)
    if update is not None:
        keys = update(keys)
    picked = []
    for span in spans:
        key_cache = _KeyCache(None, keys[span.row : span.row + 1])
        picked.append(original(self, **{**cut(given, span), cache: key_cache}))
    return join(picked)


class _KeyCache:
    """Stands for a cache, and for each of its layers: passes the keys of some tokens to `take`, and returns those of
    all."""

    def __init__(self, take: Callable | None, keys: torch.Tensor | None = None):
        self._take, self._keys = take, keys

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Do as a cache's method of this name."""
        if self._take is not None:
            self._take(keys)
        return keys if self._keys is None else self._keys

    @property
    def layers(self) -> dict[int, _KeyCache]:
        """Stand for the cache's layers."""
        return collections.defaultdict(lambda: self)

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Do as a method of this name of a cache's layer."""
        return self.update_indexer(keys, 0)


@in_patched_models
def _scoring(original: Callable) -> Callable:
    """Wrap DeepseekV4IndexerScorer.forward: q [B, S, H, D], keys [B, T, D], hidden [B, S, .] -> scores [B, S, T]."""

    @functools.wraps(original)
    def forward(self, q, compressed_kv, hidden_states):
        size, num_queries, heads = q.shape[:3]
        scores = heads * compressed_kv.shape[1]
        if fits(size * num_queries, scores):
            return original(self, q, compressed_kv, hidden_states)
        return _scored(self, original, q, compressed_kv, hidden_states, piece_of(num_queries, scores))

    return forward


@leave_to_python
def _scored(self, original: Callable, q, keys, hidden_states, step: int) -> torch.Tensor:
    """Score `step` queries of a sequence at a time."""
    scores = q.new_empty(*q.shape[:2], keys.shape[1], dtype=torch.float32)
    for row in range(q.shape[0]):
        for first in range(0, q.shape[1], step):
            piece = slice(row, row + 1), slice(first, first + step)
            scores[piece] = original(self, q[piece], keys[row : row + 1], hidden_states[piece])
    return scores


@in_patched_models
def _without_gradients(original: Callable) -> Callable:
    """Wrap a forward that returns indices alone, through which nothing trains."""

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        with torch.no_grad():
            return original(self, *args, **kwargs)

    return forward
