"""Pieces of attention: how many queries a layer computes at a time, and its arguments cut to them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..private import attributes

PIECE_BYTES = 2**29  # of a piece's scores; three tensors of that size live at once
CACHES = ("cache", "past_key_values")  # names of that argument, from Transformers 5.24 on and before


class Span(NamedTuple):
    """The tokens first .. last of a row of a batch, `last` not included."""

    row: int
    first: int
    last: int


def in_patched_models(wrap: Callable[[Callable], Callable]) -> Callable[[Callable], Callable]:
    """Decorate a function that wraps a forward, so that what it makes runs in modules of patched models alone; in others,
    which share their class, the original does."""

    @functools.wraps(wrap)
    def wrap_both(original: Callable) -> Callable:
        ours = wrap(original)

        @functools.wraps(original)
        def forward(self, *args, **kwargs):
            return (ours if vars(self).get(attributes.OUR_FORWARD) else original)(self, *args, **kwargs)

        return forward

    return wrap_both


def fits(num_queries: int, scores: int) -> bool:
    """Tell whether `num_queries` queries, each with `scores` scores in fp32, fit into one piece."""
    return 4 * num_queries * scores <= PIECE_BYTES


def piece_of(num_queries: int, scores: int) -> int:
    """Choose how many of a row's queries, each with `scores` scores, are a piece."""
    return min(num_queries, max(1, PIECE_BYTES // (4 * scores)))


def arguments_of(forward: Callable) -> tuple[Callable[[tuple, dict], dict[str, Any]], str]:
    """Make a function that names the arguments of calls of a layer's forward, and find its name of the cache."""
    parameters = list(inspect.signature(forward).parameters)[1:]

    def named(args: tuple, kwargs: dict) -> dict[str, Any]:
        return {**dict(zip(parameters, args)), **kwargs}

    return named, next(name for name in CACHES if name in parameters)


def cut(given: dict[str, Any], span: Span) -> dict[str, Any]:
    """Cut a layer's arguments [B, S, ...], also in tuples and dictionaries, to a span. Arguments [1, S, ...] belong to
    all rows; others stay as they are."""
    row, first, last = span
    size, num_tokens = given["hidden_states"].shape[:2]

    def cut_value(value):
        if isinstance(value, tuple):
            return tuple(map(cut_value, value))
        if isinstance(value, dict):
            return {name: cut_value(each) for name, each in value.items()}
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != num_tokens:
            return value
        rows = value[row : row + 1] if value.shape[0] == size else value
        return rows[:, first:last]

    return {name: cut_value(value) for name, value in given.items()}
