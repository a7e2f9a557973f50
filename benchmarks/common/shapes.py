"""The shapes that figures are given for, and random problems of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Shape(NamedTuple):
    """T tokens, H hidden size, I expert intermediate size, E experts, K experts per token."""

    T: int
    H: int
    I: int
    E: int
    K: int

    activation = "swiglu"

    @property
    def width(self) -> int:
        """Rows of the up projection."""
        return 2 * self.I

    def __str__(self):
        return ",".join(map(str, self))


class UngatedShape(Shape):
    """A shape whose activation has no gate."""

    activation = "relu2"

    @property
    def width(self) -> int:
        return self.I

    def __str__(self):
        return f"{super().__str__()},{self.activation}"


SHAPES = {
    "7B": Shape(24576, 1536, 256, 128, 8),
    "Qwen3-30B-A3B": Shape(16384, 2048, 768, 128, 8),
    "OLMoE": Shape(16384, 2048, 1024, 64, 8),
    "gpt-oss-20b": Shape(16384, 2880, 2880, 32, 4),
    "small": Shape(2048, 2048, 768, 128, 8),
}
LARGE = {  # DeepSeek-V3's layer: left out unless asked for
    "DeepSeek-V3": Shape(16384, 7168, 2048, 256, 8),
    "DeepSeek-V3, 65,536 tokens": Shape(65536, 7168, 2048, 256, 8),
}
UNGATED = {"Nemotron-3-Nano-30B-A3B": UngatedShape(16384, 2688, 1856, 128, 6)}  # likewise


def shape_of(text: str) -> Shape:
    """Parse the str of a shape."""
    kind = UngatedShape if text.endswith(f",{UngatedShape.activation}") else Shape
    return kind(*map(int, text.removesuffix(f",{UngatedShape.activation}").split(",")))


def chosen_shapes(texts: Iterable[str], ungated: bool) -> dict[str, Shape]:
    """Parse names and shapes as text into name -> shape; a shape without a name is its own. Raises SystemExit for
    ungated ones unless `ungated`."""
    known = SHAPES | LARGE | UNGATED
    names = {str(shape): name for name, shape in known.items()}
    chosen = {}
    for text in texts:
        shape = known.get(text) or shape_of(text)
        if isinstance(shape, UngatedShape) and not ungated:
            raise SystemExit(f"--shape {text}: this benchmark's layers have a gate; moe_layer.py takes this shape")
        chosen[names.get(str(shape), text)] = shape
    return chosen


def problem(shape: Shape, dtype=torch.bfloat16, device="cuda", seed=0):
    """Make x, gate_up, down, expert_TK, weight_TK, dout, scaled so that h and y are of order one; routing is
    random."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size, std=1.0):
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).mul_(std).to(dtype)

    T, H, I, E, K = shape
    x, dout = normal(T, H), normal(T, H)
    gate_up, down = normal(E, shape.width, H, std=H**-0.5), normal(E, H, I, std=I**-0.5)
    weight, expert = torch.rand(T, E, generator=generator, device=device).topk(K, dim=-1)
    return x, gate_up, down, expert, (weight / weight.sum(-1, keepdim=True)).to(dtype), dout


def activated(h, activation: str):
    """Compute a of the pre-activation h, with torch's own functions."""
    if activation == "relu2":
        return F.relu(h).square()
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up
