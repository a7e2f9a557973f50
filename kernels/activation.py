"""The gated activations that every backend computes. Without torch, so that a command line can name them."""

from __future__ import annotations

from typing import NamedTuple

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu", "clamped_silu")


class Activation(NamedTuple):
    """A gated activation a = act(gate, up).

    swiglu: silu(gate) * up; geglu: gelu(gate) * up (erf); geglu_tanh: the tanh approximation; reglu: relu(gate) * up;
    With g = min(gate, limit) and u = clamp(up, -limit, limit): clamped_swiglu (gpt-oss): g * sigmoid(alpha * g) *
    (u + 1); clamped_silu (DeepSeek-V4): silu(g) * u.
    """

    name: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0
