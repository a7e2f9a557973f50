"""The gated activations that every backend computes. Without torch, so that a command line can name them."""

from __future__ import annotations

from typing import NamedTuple

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")


class Activation(NamedTuple):
    """A gated activation a = act(gate, up).

    swiglu: silu(gate) * up; geglu: gelu(gate) * up (erf); geglu_tanh: the tanh approximation; reglu: relu(gate) * up;
    clamped_swiglu (gpt-oss): g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit).
    """

    name: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0
