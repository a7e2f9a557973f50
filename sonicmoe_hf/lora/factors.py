"""Factors: A and B of a low-rank adapter and their scale, whatever the form of the file that they come from.

Letters: E experts, r rank. Of experts A is [E, r, in] and B is [E, out, r]; of a matrix [r, in] and [out, r].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ..kernels.low_rank import a_as_peft, b_as_peft


class Factors(NamedTuple):
    """A and B of one weight, and what their product is multiplied by.

    is_transposed: whether the weight is [..., in, out].
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    is_transposed: bool = False

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[-2]

    def expert(self, number: int) -> Factors:
        """Select the factors of one expert."""
        return self._replace(a=self.a[number], b=self.b[number])

    def product(self) -> torch.Tensor:
        """Compute scale * B A of a matrix, in the shape of the weight."""
        product = (self.b @ self.a).mul_(self.scale)
        return product.T if self.is_transposed else product

    def pad_to(self, rank: int) -> Factors:
        """Pad A and B with zeros to a larger rank, whose product is the same."""
        more = rank - self.rank
        return self if not more else self._replace(a=F.pad(self.a, (0, 0, 0, more)), b=F.pad(self.b, (0, more)))

    def strip_padding(self) -> Factors:
        """Cut off the last ranks in which A and B are zeros, as `pad_to` adds them; at least one
        rank stays."""
        used = (self.a != 0).any(dim=-1) | (self.b != 0).any(dim=-2)
        ranks = used.reshape(-1, self.rank).any(dim=0).nonzero()
        rank = int(ranks[-1]) + 1 if len(ranks) else 1
        return self if rank == self.rank else self._replace(a=self.a[..., :rank, :], b=self.b[..., :rank])

    def drop_unused_ranks(self) -> Factors:
        """Leave out the ranks in which B is zero, unless B is zero everywhere."""
        used = (self.b != 0).flatten(0, -2).any(dim=0)
        if used.all() or not used.any():
            return self
        return self._replace(a=self.a[..., used, :], b=self.b[..., used])

    def rescale(self, scale: float) -> Factors:
        """Change the scale, but not the product: B is multiplied by the quotient in fp32, and rounded once."""
        if scale == self.scale:
            return self
        return self._replace(b=(self.b.float() * (self.scale / scale)).to(self.b.dtype), scale=scale)

    def with_zero_product(self) -> Factors:
        """Make factors of these shapes and this A whose product is zero."""
        return self._replace(b=torch.zeros_like(self.b))

    def is_zero(self) -> bool:
        """Tell whether A and B are zeros, as no initialisation leaves them."""
        return not (self.a.any() or self.b.any())


def as_alpha(alpha: float) -> float:
    """Convert `alpha` to a whole number if it is one but for rounding."""
    whole = round(alpha)
    return whole if math.isclose(alpha, whole, rel_tol=1e-12) else alpha


def to_peft(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy A and B as PEFT stores them: [r*E, in] and [out, r*E], or as they are of a matrix."""
    a, b = factors.a, factors.b
    if a.dim() == 3:
        a, b = a_as_peft(a), b_as_peft(b)
    return a.clone(memory_format=torch.contiguous_format), b.clone(memory_format=torch.contiguous_format)


def split_gate_and_up(factors: Factors, interleaved: bool) -> tuple[Factors, Factors]:
    """Split the factors of both gate and up, whose B is [E, 2I, r]; ranks that one does not use go."""
    gate, up = (factors.b[:, 0::2], factors.b[:, 1::2]) if interleaved else factors.b.chunk(2, dim=1)
    return factors._replace(b=gate).drop_unused_ranks(), factors._replace(b=up).drop_unused_ranks()


def fuse_gate_and_up(gate: Factors, up: Factors, interleaved: bool) -> Factors:
    """Invert `split_gate_and_up`. Where A differs, the rank is the sum of both, and zeros stand beside each half of B."""
    if gate.a.shape == up.a.shape and gate.scale == up.scale and torch.equal(gate.a, up.a):
        a, halves = gate.a, (gate.b, up.b)
    else:
        scale = gate.scale if gate.scale == up.scale else 1.0
        gate, up = gate.rescale(scale), up.rescale(scale)
        a = torch.cat((gate.a, up.a), dim=1)
        halves = F.pad(gate.b, (0, up.rank)), F.pad(up.b, (gate.rank, 0))
    b = torch.stack(halves, dim=2).flatten(1, 2) if interleaved else torch.cat(halves, dim=1)
    return gate._replace(a=a, b=b)


def reorder_gate_up(factors: Factors, interleaved: bool) -> Factors:
    """Put gate's and up's rows of B, which alternate if `interleaved`, one half after the other, or the reverse."""
    shape = (-1, 2) if interleaved else (2, -1)
    return factors._replace(b=factors.b.unflatten(1, shape).transpose(1, 2).flatten(1, 2))


def stack_experts(experts: list[Factors]) -> Factors:
    """Join each expert's own factors to [E, ...] of all experts: they get the largest rank, and one scale."""
    rank, scales = max(factors.rank for factors in experts), {factors.scale for factors in experts}
    scale = scales.pop() if len(scales) == 1 else 1.0
    alike = [factors.rescale(scale).pad_to(rank) for factors in experts]
    return Factors(torch.stack([f.a for f in alike]), torch.stack([f.b for f in alike]), scale)
