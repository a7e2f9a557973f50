"""The choices that layers make at run time, as planning foresees them."""

from __future__ import annotations

from ...expert_parallel.exchange import MANY_BYTES, choose_exchange
from ...layer.pieces import MAX_ROWS, tokens_of_piece
from ...streaming.memory import packed_nbytes

__all__ = ["MAX_ROWS", "gathers_tokens", "is_in_pieces", "makes_room_for_all_ranks", "packed_nbytes"]


def is_in_pieces(num_tokens: int, num_rows: int) -> bool:
    """Tell whether a layer computes these rows of its tokens in pieces."""
    return tokens_of_piece(num_tokens, num_rows) > 0


def gathers_tokens(num_ranks: int, gathered_bytes: int) -> bool:
    """Tell whether expert parallelism gathers the tokens of all ranks, which take so many bytes."""
    return choose_exchange(num_ranks, gathered_bytes) == "gathering"


def makes_room_for_all_ranks(gathered_bytes: int) -> bool:
    """Tell whether buffers of rows have room for the pairs of all ranks, where their tokens are gathered."""
    return gathered_bytes < MANY_BYTES
