"""Sizes of the pieces of queries that indexers score at a time, and the arguments of their forwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

PIECE_BYTES = 2**29  # of the scores of a piece; three such tensors live at once
CACHES = ("cache", "past_key_values")  # names of that argument, from Transformers 5.24 on and before


def fits(num_queries: int, scores: int) -> bool:
    """Tell whether so many queries, each with so many scores in fp32, are a piece."""
    return 4 * num_queries * scores <= PIECE_BYTES


def piece_of(num_queries: int, scores: int) -> int:
    """Choose how many queries of a sequence to take at once."""
    return min(num_queries, max(1, PIECE_BYTES // (4 * scores)))


def arguments_of(forward: Callable) -> tuple[Callable[[tuple, dict], dict[str, Any]], str]:
    """Make a function that names the arguments of calls of an indexer's forward, and find its name of the cache."""
    parameters = list(inspect.signature(forward).parameters)[1:]

    def named(args: tuple, kwargs: dict) -> dict[str, Any]:
        return {**dict(zip(parameters, args)), **kwargs}

    return named, next(name for name in CACHES if name in parameters)
