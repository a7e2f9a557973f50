"""Masks that torch's attention on a CPU adds to the scores, with what `AttentionOptions` says in them.

Letters: B rows of a batch, T queries, S keys; q [B, T, H, D], k [B, S, H / G, D].
"""

from __future__ import annotations

import torch

from .flash import NO_WINDOW
from .sinks import AttentionOptions


def _mask(sees: torch.Tensor, distance: torch.Tensor, q, options: AttentionOptions) -> torch.Tensor:
    """Make the mask to add to the scores, from the keys that a query `sees` and their distance before it, which options
    limits; both broadcast to [B, 1, T, S]."""
    if options.causal:
        sees = sees & (distance >= 0)
    if options.window != NO_WINDOW:
        sees = sees & (distance.abs() < options.window)
    mask = torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill(~sees, -torch.inf)
    return mask[(None,) * (4 - mask.dim())]


def causal_mask(q, k, options: AttentionOptions, numbers: torch.Tensor | None = None) -> torch.Tensor:
    """Make the mask of rows in which the last query has the last key's position. numbers: [B, T], which of a row's packed
    sequences a token is of; None where a row is one."""
    queries, keys = (
        torch.arange(q.shape[1], dtype=torch.int64, device=q.device),
        torch.arange(k.shape[1], dtype=torch.int64, device=q.device),
    )
    distance = (queries[:, None] + (k.shape[1] - q.shape[1]) - keys)[None, None]
    sees = torch.ones_like(distance, dtype=torch.bool)
    if numbers is not None:
        sees = numbers[:, None, :, None] == numbers[:, None, None]
    return _mask(sees, distance, q, options)


def mask_of_starts(q, k, options: AttentionOptions, starts) -> torch.Tensor:
    """Make the mask of packed sequences: the last query of each has its last key's position."""
    queries, keys = (
        torch.arange(q.shape[1], dtype=torch.int64, device=q.device),
        torch.arange(k.shape[1], dtype=torch.int64, device=q.device),
    )
    starts_q, starts_k = (x.to(q.device) for x in starts)
    number_q, number_k = (torch.searchsorted(x, i, right=True) for x, i in ((starts_q, queries), (starts_k, keys)))
    sees = (number_q[:, None] == number_k) & (number_q < len(starts_q))[:, None]
    end_q, end_k = (torch.cat([x, x[-1:]])[number] for x, number in ((starts_q, number_q), (starts_k, number_k)))
    return _mask(sees, (end_k - keys) - (end_q - queries)[:, None], q, options)
