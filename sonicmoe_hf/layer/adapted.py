"""The adapters of experts on their way from whoever wraps the experts (PEFT) to the experts' forward: an argument.

Nothing is written anywhere, so that torch.compile takes layers under gradient checkpointing: it refuses regions that
change what is outside of them.
"""

from __future__ import annotations

from typing import Any

from .projection import LowRank


class Adapted:
    """Adapters of weights by their names, and the router's top_k_index, in whose place they go to the experts.

    A plain class: FSDP2's mixed precision casts the tensors inside tuples and dicts.
    """

    def __init__(self, top_k_index: Any, adapters: dict[str, list[LowRank]]):
        self.top_k_index = top_k_index
        self.adapters = adapters


def with_adapters(top_k_index: Any, name: str, adapters: list[LowRank]) -> Adapted:
    """Add adapters of the weight `name` to a top_k_index; those that it has for that weight already, which a wrapper
    further out gave it, count instead."""
    index, given = split(top_k_index)
    return Adapted(index, {name: adapters, **given})


def split(top_k_index: Any) -> tuple[Any, dict[str, list[LowRank]]]:
    """Give the router's own top_k_index, and the adapters by the names of their weights."""
    if isinstance(top_k_index, Adapted):
        return top_k_index.top_k_index, top_k_index.adapters
    return top_k_index, {}
