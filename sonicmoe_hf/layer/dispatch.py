"""dispatch: the pairs of a routing sorted by expert, as the kernels read them, with the rows of each token."""

from __future__ import annotations

import torch

from ..kernels.interface import Rows, unwritten_rows
from . import backends, torch_op


def _dispatch(
    expert_P: torch.Tensor,
    token_P: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    sentinels: bool,
    backend: str,
) -> list[torch.Tensor]:
    return list(backends.load(backend).dispatch(expert_P, token_P, num_tokens, num_experts, sentinels))


def fake_rows(expert_P, num_tokens, num_experts, backend):
    """Allocate empty tensors in the shapes of the Rows of these pairs."""
    num_pairs = expert_P.numel()
    num_tiles = backends.load(backend).tile_table_length(num_pairs, num_experts)
    return list(unwritten_rows(expert_P, num_pairs, num_tokens, num_experts, num_tiles))


def _fake_dispatch(expert_P, token_P, num_tokens, num_experts, sentinels, backend):
    return fake_rows(expert_P, num_tokens, num_experts, backend)


def _launches(expert_P, token_P, num_tokens, num_experts, sentinels, backend):
    if backend != "eager":
        _dispatch(expert_P, token_P, num_tokens, num_experts, sentinels, backend)


_DISPATCH = torch_op.Op(_dispatch, _fake_dispatch, "dispatch", launches=_launches)


def dispatch(
    expert_index: torch.Tensor,
    num_tokens: int,
    num_experts: int,
    token_index: torch.Tensor | None = None,
    *,
    sentinels: bool = False,
    backend: str | None = None,
    piece: int = 0,
) -> Rows:
    """Sort routed pairs by expert.

    Args:
        expert_index: [T, K], or any shape of P pairs with `token_index`; integer expert ids.
        num_tokens, num_experts: T and E.
        token_index: the token of each pair, same shape; None for [T, K], where pair p belongs to token p // K.
        sentinels: ids outside 0..E-1 mean "no expert" (expert parallelism) instead of an error. A pair without an expert
            may name any token.
        piece: sort each piece of so many tokens by itself (pieces.py); 0: all together.
    Returns:
        `kernels.interface.Rows`; within an expert, rows keep the order of the pairs. Of pieces, the fields of each one's
        after those of the one before.
    Raises:
        ValueError: an id names no expert, or no token (on a CPU, where looking is free; on a GPU a device-side assertion
            fails later, as for any index out of range), or shapes disagree.
    """
    if expert_index.dtype.is_floating_point or expert_index.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"expert_index has dtype {expert_index.dtype}; expert ids are integers")
    if token_index is None:
        if expert_index.dim() != 2 or expert_index.shape[0] != num_tokens:
            raise ValueError(
                f"expert_index has shape {tuple(expert_index.shape)}; without token_index it must be [T, K] with "
                f"T = {num_tokens} tokens"
            )
    elif token_index.shape != expert_index.shape:
        raise ValueError(
            f"token_index has shape {tuple(token_index.shape)}, expert_index {tuple(expert_index.shape)}; "
            "they list the same pairs"
        )
    if backend is None:
        backend = backends.choose(expert_index.device, None).name
    if piece:
        pieces = (
            dispatch(index, index.shape[0], num_experts, sentinels=sentinels, backend=backend)
            for index in expert_index.split(piece)
        )
        return Rows(*map(torch.cat, zip(*pieces)))
    pairs = expert_index, token_index, num_tokens, num_experts, sentinels
    if torch_op.traced("dispatch", expert_index, token_index):
        return Rows(*_DISPATCH(False, *pairs, backend))
    return backends.load(backend).dispatch(*pairs)
