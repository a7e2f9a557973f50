"""How many queries are scored at a time, and what indexers of different versions of Transformers have in common."""

from __future__ import annotations

PIECE_BYTES = 2**29  # of the scores of a piece; three such tensors live at once
CACHES = ("cache", "past_key_values")  # names of that argument, from Transformers 5.24 on and before


def fits(num_queries: int, scores: int) -> bool:
    """Tell whether so many queries, each with so many scores in fp32, are a piece."""
    return 4 * num_queries * scores <= PIECE_BYTES


def piece_of(num_queries: int, scores: int) -> int:
    """Choose how many queries of a sequence to take at once."""
    return min(num_queries, max(1, PIECE_BYTES // (4 * scores)))
