"""Choose how many queries an attention layer computes at a time, and cut the layer's arguments to some tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

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


def cut(given: dict[str, Any], row: int, first: int, last: int) -> dict[str, Any]:
    """Cut a layer's arguments [B, S, ...], or tuples and dictionaries of such, to some tokens of one row.
    Arguments [1, S, ...] belong to all rows; others stay as they are."""
    size, num_tokens = given["hidden_states"].shape[:2]

    def part(value):
        if isinstance(value, tuple):
            return tuple(map(part, value))
        if isinstance(value, dict):
            return {name: part(each) for name, each in value.items()}
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != num_tokens:
            return value
        rows = value[row : row + 1] if value.shape[0] == size else value
        return rows[:, first:last]

    return {name: part(value) for name, value in given.items()}
