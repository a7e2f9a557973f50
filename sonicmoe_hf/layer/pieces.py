"""Pieces of a layer's tokens, in which the op of `moe_experts` computes a layer of very many rows, so that what it holds
at once does not grow with them. Where h would be kept it is not: backward computes it again, piece by piece.

Only layers routed by top-k are cut: each of their tokens has K rows. Of other routings only the device knows how many.
Letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..kernels.interface import Rows, accumulation_dtype
from . import backends
from .call import LayerCall, Saved

MAX_ROWS = 2**18  # of a piece: 32,768 tokens of 8 experts, with which kernels are at full speed
MULTIPLE = 128  # of tokens, so that pieces of [T, K] begin at multiples of 16 bytes


def tokens_of_piece(num_tokens: int, num_rows: int) -> int:
    """Count the tokens of each piece but the last; 0 where the layer is not cut."""
    if num_rows <= MAX_ROWS:
        return 0
    count = -(-num_rows // MAX_ROWS)
    return -(-num_tokens // (count * MULTIPLE)) * MULTIPLE


def _pieces(call: LayerCall) -> Iterator[LayerCall]:
    """Yield the call of each piece. Its rows are copied out of those that `dispatch` joined, because kernels read aligned
    memory."""
    assert call.x is not None
    size, rows, saved = call.options.piece, call.rows, call.saved
    xs, weights = call.x.split(size), call.weight.split(size)
    pairs = [weight.numel() for weight in weights]
    num_offsets = rows.offsets.shape[0] // len(xs)
    kernels = backends.load(call.options.backend)
    sizes = {
        "offsets": [num_offsets] * len(xs),
        "token": pairs,
        "pair": pairs,
        "token_offsets": [len(x) + 1 for x in xs],
        "token_rows": pairs,
        "tiles": [kernels.tile_table_length(count, num_offsets - 1) for count in pairs],
    }
    split = {name: getattr(rows, name).split(sizes[name]) for name in Rows._fields}
    us, vs = ([None] * len(xs) if each is None else each.split(pairs) for each in (saved.u, saved.v))
    for i, (x, weight, u, v) in enumerate(zip(xs, weights, us, vs)):
        of_piece = Rows(**{name: pieces[i].clone() for name, pieces in split.items()})
        yield call._replace(x=x, weight=weight, rows=of_piece, saved=Saved(u=u, v=v))


def forward(run: Callable[[list[LayerCall]], list[torch.Tensor]], call: LayerCall) -> list[torch.Tensor]:
    """Compute a layer's results by `run` of each piece."""
    results = [run([piece]) for piece in _pieces(call)]
    return [torch.cat(pieces) for pieces in zip(*results)]


def backward(run: Callable, call: LayerCall, dout_TH: torch.Tensor, needs: tuple[str, ...]) -> list[torch.Tensor]:
    """Compute a layer's gradients by `run` of each piece, as products.backward: those of x and the routing weights one
    after the other, all others summed in fp32. h is computed again."""
    joined: dict[str, list[torch.Tensor]] = {name: [] for name in ("x", "weight")}
    summed: dict[str, torch.Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece, dout in zip(_pieces(call), dout_TH.split(call.options.piece)):
        for name, gradient in zip(needs, run([piece], dout, needs), strict=True):
            if name in joined:
                joined[name].append(gradient)
            elif name in summed:
                summed[name].add_(gradient)
            else:
                dtypes[name] = gradient.dtype
                summed[name] = gradient.to(accumulation_dtype(gradient.dtype))
    return [torch.cat(joined[name]) if name in joined else summed[name].to(dtypes[name]) for name in needs]
