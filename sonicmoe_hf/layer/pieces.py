"""Pieces of a layer's tokens, in which the op of `moe_experts` computes a layer of very many rows, so that what it holds
at once does not grow with them. Where h would be kept it is not: backward computes it again, piece by piece.

Top-k alone: a stretch of its tokens has K rows for each. Of other routings only the device knows how many.
Letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..kernels.interface import Rows, accumulation_dtype
from . import backends

MAX_ROWS = 2**18  # of a piece: 32,768 tokens of 8 experts, with which kernels are at full speed
MULTIPLE = 128  # of tokens, so that pieces of [T, K] begin at multiples of 16 bytes


def tokens_of_piece(num_tokens: int, num_rows: int) -> int:
    """Give the tokens of each piece but the last; 0 where the layer is not cut."""
    if num_rows <= MAX_ROWS:
        return 0
    count = -(-num_rows // MAX_ROWS)
    return -(-num_tokens // (count * MULTIPLE)) * MULTIPLE


def _pieces(inputs: Any, rows: Rows, options: Any) -> Iterator[tuple[Any, Rows]]:
    """Yield (inputs, Rows) of each piece; Rows that `dispatch` joined, in memory of their own, which kernels want
    aligned."""
    xs, weights = inputs.x.split(options.piece), inputs.weight.split(options.piece)
    pairs = [weight.numel() for weight in weights]
    offsets = rows.offsets.shape[0] // len(xs)
    tiles = [backends.load(options.backend).tile_table_length(count, offsets - 1) for count in pairs]
    sizes = [offsets] * len(xs), pairs, pairs, [len(x) + 1 for x in xs], pairs, tiles
    split = zip(*(field.split(size) for field, size in zip(rows, sizes)))
    for x, weight, fields in zip(xs, weights, split):
        yield inputs._replace(x=x, weight=weight), Rows(*(field.clone() for field in fields))


def forward(run: Callable, inputs: Any, options: Any, flags: Any, rows: Rows) -> list[torch.Tensor]:
    """Compute a layer's results by `run` of each piece, whose arguments these are."""
    results = [run([each, options, flags, of_piece]) for each, of_piece in _pieces(inputs, rows, options)]
    return [torch.cat(parts) for parts in zip(*results)]


def backward(run: Callable, dout, h, u, v, inputs: Any, options: Any, needs: tuple, rows: Rows) -> list[torch.Tensor]:
    """Compute a layer's gradients by `run` of each piece, whose arguments these are: those of x and the routing weights
    one after the other, all others summed in fp32. h: None."""
    count = -(-dout.shape[0] // options.piece)
    rows_of_piece = options.piece * inputs.weight.shape[1]
    shrunk = ([None] * count if rank is None else rank.split(rows_of_piece) for rank in (u, v))
    is_of_tokens = [place in (0, len(needs) - 1) for place, needed in enumerate(needs) if needed]
    joined: list[Any] = [[] if of_tokens else None for of_tokens in is_of_tokens]
    dtypes = [dout.dtype] * len(joined)
    for (each, of_piece), dout_piece, *ranks in zip(
        _pieces(inputs, rows, options), dout.split(options.piece), *shrunk
    ):
        for place, gradient in enumerate(run([dout_piece, h, *ranks, each, options, needs, of_piece])):
            if is_of_tokens[place]:
                joined[place].append(gradient)
            elif joined[place] is None:
                dtypes[place] = gradient.dtype
                joined[place] = gradient.to(accumulation_dtype(gradient.dtype))
            else:
                joined[place].add_(gradient)
    return [torch.cat(each) if isinstance(each, list) else each.to(dtype) for each, dtype in zip(joined, dtypes)]
