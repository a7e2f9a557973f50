"""The activations that every backend computes. Without torch, so that a command line can name them."""

from __future__ import annotations

from typing import NamedTuple

GATED = (
    "swiglu",
    "geglu",
    "geglu_tanh",
    "reglu",
    "clamped_swiglu",
    "clamped_silu",
    "silu_clamped",
    "softcapped_swiglu",
)
UNGATED = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
ACTIVATIONS = (*GATED, *UNGATED)


def is_gated(name: str) -> bool:
    """Tell whether the activation of this name multiplies a gate and an up: then its up projection has 2I rows, else
    I."""
    return name not in UNGATED


class Activation(NamedTuple):
    """An activation: a = act(gate, up), gated, or a = act(h).

    swiglu: silu(gate) * up; geglu: gelu(gate) * up (erf); geglu_tanh: the tanh approximation; reglu: relu(gate) * up;
    With g = min(gate, limit) and u = clamp(up, -limit, limit): clamped_swiglu (gpt-oss): g * sigmoid(alpha * g) *
    (u + 1); clamped_silu (DeepSeek-V4): silu(g) * u; silu_clamped (Step-3.7): min(silu(gate), limit) * u.
    softcapped_swiglu (Inkling2): alpha * tanh(gate / alpha) * sigmoid(gate) * limit * tanh(up / limit). Without a gate:
    silu(h); gelu(h) (erf); gelu_tanh(h); relu(h); relu2: relu(h) squared (Nemotron-H).
    """

    name: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def is_gated(self) -> bool:
        return is_gated(self.name)

    def inner(self, width: int) -> int:
        """Compute I of an up projection with `width` rows."""
        return width // 2 if self.is_gated else width

    def width(self, inner: int) -> int:
        """Compute the number of rows of the up projection: 2I, or I without a gate."""
        return 2 * inner if self.is_gated else inner
