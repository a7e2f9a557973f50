"""A call of a layer: one object, whose fields are taken by name, from `moe_experts` to the products.

The arguments of torch's ops are its leaves: the fields of the tuples in it, one after the other. A leaf's name, such as
"gate_up_weight", is the name of its gradient too.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import NamedTuple

import torch

from ..kernels.interface import Activation, Rows
from .projection import Projection
from .torch_op import Form


class Saved(NamedTuple):
    """The results of forward that backward gets: h, u = scale x A1^T, v = scale a A2^T; None for one that backward
    computes again, or does not need."""

    h: torch.Tensor | None = None
    u: torch.Tensor | None = None
    v: torch.Tensor | None = None


class SaveFlags(NamedTuple):
    """The fields of Saved that forward returns: a flag for each."""

    h: bool = False
    u: bool = False
    v: bool = False

    def choose(self, saved: Saved) -> list[torch.Tensor]:
        """List the tensors that these flags name."""
        return [getattr(saved, name) for name in compress(self._fields, self)]

    def restore(self, tensors: Iterable[torch.Tensor]) -> Saved:
        """Invert `choose`: make a Saved of the tensors that it listed."""
        return Saved(**dict(zip(compress(self._fields, self), tensors, strict=True)))


class Options(NamedTuple):
    """The constants that decide the function of a layer, the backend, and what a call saves for backward."""

    activation: Activation
    transposed: bool
    interleaved: bool
    backend: str
    fp8: bool = False
    saves: SaveFlags = SaveFlags()
    keeps_expanded: bool = False  # of packed weights: kept.may_keep
    piece: int = 0  # the tokens of a piece, where a layer is cut (pieces.py)


class LayerCall(NamedTuple):
    """A layer with its tokens.

    weight: the routing's, [T, K] or [P]; it comes first, since a tape asks for a tensor there.
    x: [T, H]; None in a backward that does not need it.
    saved: what forward, or its first half, has computed already.
    """

    weight: torch.Tensor
    x: torch.Tensor | None
    gate_up: Projection
    down: Projection
    rows: Rows
    options: Options
    saved: Saved = Saved()

    def projection(self, name: str) -> Projection:
        """Select a projection by name, "gate_up" or "down"."""
        return {"gate_up": self.gate_up, "down": self.down}[name]


CALL = Form({"call": LayerCall})
