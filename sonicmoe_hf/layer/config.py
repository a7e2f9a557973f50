"""Frozen settings, checked when they are made."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from ..kernels.activation import is_gated

ROUNDINGS = ("nearest", "balanced", "stochastic", "nearest_score", "up", "down")
SAVE_CHOICES = ("preactivation", "input")
COMPUTE_CHOICES = (None, "fp8")  # what packed experts are computed in: the dtype they are expanded to, or FP8
LAYOUTS = {  # name: (transposed, interleaved)
    "concatenated": (False, False),
    "interleaved": (False, True),
    "transposed_concatenated": (True, False),
    "transposed_interleaved": (True, True),
}
DEFAULT_TILE = 128


def check_choice(what: str, value, choices, note: str = "") -> None:
    """Raise a ValueError that names `value`, the choice that looks like it and all choices, unless `value` is one. A note
    about the choices ends it."""
    if value not in choices:
        words = [choice for choice in choices if isinstance(choice, str)]
        similar = difflib.get_close_matches(str(value).lower(), words, 1, cutoff=0.8)  # not int4 for int3
        meant = f" (did you mean {similar[0]!r}?)" if similar else ""
        raise ValueError(f"{what} is {value!r}{meant}; choose one of {', '.join(map(repr, choices))}{note}")


def check_order(layout: str, activation: str) -> None:
    """Raise a ValueError where `layout` interleaves gate and up rows and the activation of this name has no gate."""
    if LAYOUTS[layout][1] and not is_gated(activation):
        raise ValueError(
            f"activation {activation!r} has no gate, so layout={layout!r} (the native layout's order) has nothing to "
            "interleave its up projection with; use layout='concatenated' or 'transposed_concatenated'"
        )


@dataclass(frozen=True, kw_only=True)
class TokenRounding:
    """Training-time routing that rounds the rows of every expert to a multiple of the GEMM tile (paper, section 4).

    The number of rows is known only on the device, so what a layer keeps for backward (h, 4*I bytes a row in bf16) is
    allocated at its maximum (`max_rows`). "balanced" is the rounding that goes both ways and costs no memory.

    Args:
        rounding: how f rows become a multiple of the tile M, and the maximum number of rows that T*K become:
            "nearest": a tie goes down; T*K + E*M/2.
            "balanced": nearest, with the residual carried from expert to expert, so that the total stays within M/2 of
            top-k's; T*K + M/2.
            "stochastic": up with probability frac(f/M), drawn from torch's generator on the device; T*K + E*(M-1).
            "nearest_score": the side that changes the expert's sum of scores least, a tie goes down; T*K + E*(M-1).
            "up": T*K + E*(M-1). "down": T*K.
        tile: M, rows; 128 on every backend unless set.
        min_tiles_per_expert: below this mean number of tiles per expert a call keeps plain top-k, because quality
            drops there (docs/token-rounding.md, section Quality; paper, table 6).
    """

    rounding: str = "nearest"
    tile: int | None = None
    min_tiles_per_expert: float = 4.0

    def __post_init__(self):
        check_choice("rounding", self.rounding, ROUNDINGS)
        if self.tile is not None and (not isinstance(self.tile, int) or isinstance(self.tile, bool) or self.tile < 1):
            raise ValueError(f"tile is {self.tile!r}; it counts rows: a whole number of at least 1, or None for 128")
        if not 0 <= self.min_tiles_per_expert < math.inf:
            raise ValueError(f"min_tiles_per_expert is {self.min_tiles_per_expert!r}; it must be finite and >= 0")

    @property
    def tile_rows(self) -> int:
        """The tile M in rows."""
        return DEFAULT_TILE if self.tile is None else self.tile

    def max_rows(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Compute the maximum number of rows after rounding, whatever the routing: h is allocated at this size."""
        rows, tile = num_tokens * top_k, self.tile_rows
        extra = {"nearest": num_experts * (tile // 2), "balanced": tile // 2, "down": 0}
        return min(rows + extra.get(self.rounding, num_experts * (tile - 1)), num_tokens * num_experts)

    def min_pairs(self, num_experts: int) -> int:
        """Compute the minimum number of pairs (token, expert) that give every expert `min_tiles_per_expert` tiles on
        average."""
        return math.ceil(self.min_tiles_per_expert * self.tile_rows * num_experts)

    def applies(self, num_tokens: int, top_k: int, num_experts: int) -> bool:
        """Tell whether this many tokens give every expert `min_tiles_per_expert` tiles on average."""
        return num_tokens * top_k >= self.min_pairs(num_experts)


def as_routing_policy(routing) -> TokenRounding | None:
    """Convert None or "top_k" -> None; "token_rounding" -> TokenRounding(); a TokenRounding stays itself."""
    if isinstance(routing, TokenRounding):
        return routing
    if routing in ROUNDINGS:
        raise ValueError(f"routing is {routing!r}, a kind of token rounding: give TokenRounding(rounding={routing!r})")
    check_choice("routing", routing, (None, "top_k", "token_rounding", TokenRounding()))
    return TokenRounding() if routing == "token_rounding" else None
