"""The factors of a LoRA adapter, whatever the form of the file: by weight, with the scale of their product.

Letters: E experts, r rank. Of experts A is [E, r, in] and B is [E, out, r]; of a linear layer [r, in] and [out, r].
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn import functional as F

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # in the order in which Transformers' experts modules declare them
PARTS = ("gate", "up", "down")  # what engines adapt one by one


class Factors(NamedTuple):
    """A and B of one weight, and what their product is multiplied by."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[-2]

    def padded(self, rank: int) -> Factors:
        """The same product by factors of a larger rank: zeros beside what is there."""
        more = rank - self.rank
        return self if not more else Factors(F.pad(self.a, (0, 0, 0, more)), F.pad(self.b, (0, more)), self.scale)

    def scaled_to(self, scale: float) -> Factors:
        """The same product with another scale: what it lacks is multiplied into B, in fp32, and rounded once."""
        if scale == self.scale:
            return self
        return Factors(self.a, (self.b.float() * (self.scale / scale)).to(self.b.dtype), scale)

    def unchanging(self) -> Factors:
        """Factors of these shapes and this A whose product is zero."""
        return self._replace(b=torch.zeros_like(self.b))

    def is_zero(self) -> bool:
        """Whether A and B are zeros, as no initialisation leaves them."""
        return not (self.a.any() or self.b.any())


class AdapterFactors(NamedTuple):
    """All factors of an adapter.

    linear: by name of a linear layer. experts: by name of an experts module and of its weight, one of EXPERT_WEIGHTS, or
    one of PARTS once it is split.
    """

    linear: dict[str, Factors]
    experts: dict[str, dict[str, Factors]]

    def every(self) -> list[Factors]:
        """Those of all weights."""
        return [*self.linear.values(), *(factors for both in self.experts.values() for factors in both.values())]

    def rank(self) -> int:
        """The largest."""
        return max(factors.rank for factors in self.every())

    def common_alpha(self, rank: int) -> float:
        """A lora_alpha for factors of `rank`: by which products have their scale, if they share one and it makes a whole
        number, and else 1, so that every B is to be scaled."""
        scales = {factors.scale for factors in self.every()}
        alpha = as_alpha(max(scales) * rank)
        return alpha if len(scales) == 1 and isinstance(alpha, int) else rank

    def uniform(self, rank: int, alpha: float) -> AdapterFactors:
        """The same products by factors of one rank and one scale, alpha / rank."""
        scale = alpha / rank
        return AdapterFactors(
            {name: factors.scaled_to(scale).padded(rank) for name, factors in self.linear.items()},
            {
                module: {name: factors.scaled_to(scale).padded(rank) for name, factors in weights.items()}
                for module, weights in self.experts.items()
            },
        )

    def split(self, interleaved: bool) -> AdapterFactors:
        """With gate's and up's factors apart. interleaved: whether their rows alternate."""
        experts = {}
        for module, weights in self.experts.items():
            experts[module] = {part: factors for part, factors in weights.items() if part in PARTS}
            if "gate_up_proj" in weights:
                gate, up = gate_and_up(weights["gate_up_proj"], interleaved)
                experts[module].update(gate=gate, up=up)
            if "down_proj" in weights:
                experts[module]["down"] = weights["down_proj"]
        return AdapterFactors(self.linear, experts)

    def fused(self, interleaved: bool) -> AdapterFactors:
        """The inverse of `split`; where only one of gate and up is there, the other gets no change."""
        experts = {}
        for module, weights in self.experts.items():
            experts[module] = {name: factors for name, factors in weights.items() if name in EXPERT_WEIGHTS}
            one = weights.get("gate") or weights.get("up")
            if one is not None:
                gate, up = (weights.get(part) or one.unchanging() for part in ("gate", "up"))
                experts[module]["gate_up_proj"] = fused_gate_up(gate, up, interleaved)
            if "down" in weights:
                experts[module]["down_proj"] = weights["down"]
        return AdapterFactors(self.linear, experts)

    def without_zeros(self) -> AdapterFactors:
        """The factors of weights of experts that are not all zeros."""
        kept = {
            module: {name: factors for name, factors in weights.items() if not factors.is_zero()}
            for module, weights in self.experts.items()
        }
        return AdapterFactors(self.linear, {module: weights for module, weights in kept.items() if weights})


def scale_of(rank: float, alpha: float, config: dict) -> float:
    """What PEFT multiplies a product by under this adapter_config.json."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def as_alpha(alpha: float) -> float:
    """`alpha`, as a whole number if it is one but for rounding."""
    whole = round(alpha)
    return whole if math.isclose(alpha, whole, rel_tol=1e-12) else alpha


def from_peft(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """lora_A [r*E, in], the expert slowest, and lora_B [out, r*E], the expert fastest -> A [E, r, in], B [E, out, r]."""
    return a.unflatten(0, (num_experts, -1)), b.unflatten(1, (-1, num_experts)).permute(2, 0, 1).contiguous()


def to_peft(factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `from_peft`."""
    return factors.a.flatten(0, 1).contiguous(), factors.b.permute(1, 2, 0).flatten(1).contiguous()


def gate_and_up(factors: Factors, interleaved: bool) -> tuple[Factors, Factors]:
    """The factors of gate and up, which share A, from those of both, whose B is [E, 2I, r]."""
    gate, up = (factors.b[:, 0::2], factors.b[:, 1::2]) if interleaved else factors.b.chunk(2, dim=1)
    return factors._replace(b=gate), factors._replace(b=up)


def fused_gate_up(gate: Factors, up: Factors, interleaved: bool) -> Factors:
    """The inverse of `gate_and_up`. Where A differs, the rank is the sum of both, and zeros stand beside each half."""
    if gate.a.shape == up.a.shape and gate.scale == up.scale and torch.equal(gate.a, up.a):
        a, halves = gate.a, (gate.b, up.b)
    else:
        scale = gate.scale if gate.scale == up.scale else 1.0
        gate, up = gate.scaled_to(scale), up.scaled_to(scale)
        a = torch.cat((gate.a, up.a), dim=1)
        halves = F.pad(gate.b, (0, up.rank)), F.pad(up.b, (gate.rank, 0))
        gate = gate._replace(scale=scale)
    b = torch.stack(halves, dim=2).flatten(1, 2) if interleaved else torch.cat(halves, dim=1)
    return Factors(a, b, gate.scale)


def stacked(experts: list[Factors]) -> Factors:
    """The factors [E, ...] of all experts from each one's own: of one rank, the largest, and one scale."""
    rank, scales = max(factors.rank for factors in experts), {factors.scale for factors in experts}
    scale = scales.pop() if len(scales) == 1 else 1.0
    alike = [factors.scaled_to(scale).padded(rank) for factors in experts]
    return Factors(torch.stack([f.a for f in alike]), torch.stack([f.b for f in alike]), scale)


def endings(names: Iterable[str], everything: Iterable[str], parts: tuple[int, ...]) -> list[str]:
    """What PEFT is told for `names`: of each the shortest ending of one of these numbers of parts that nothing else in
    `everything` has, or the whole name."""
    wanted, chosen = set(names), {}
    for number in parts:
        left = [name for name in wanted if name not in chosen]
        others = {_ending(name, number) for name in everything if name not in wanted}
        chosen.update({name: _ending(name, number) for name in left if _ending(name, number) not in others})
    return sorted({chosen.get(name, name) for name in wanted})


def _ending(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])
