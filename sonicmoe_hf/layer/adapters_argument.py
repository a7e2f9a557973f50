"""The adapters of experts on their way from whoever wraps the experts (PEFT) to the experts' forward: a keyword
argument, so that hooks on the way see, and may change, the arguments that Transformers' experts get.

The call writes no state outside of itself, because torch.compile does not trace a checkpointed layer that does.
"""

from __future__ import annotations

from .projection import LowRank

KEYWORD = "sonicmoe_hf_adapters"  # of the experts' forward


class Adapters:
    """Adapters of weights by their names, and whether the experts' forward has taken them.

    A plain class: FSDP2's mixed precision casts the tensors inside tuples and dicts.
    """

    def __init__(self) -> None:
        self.by_weight: dict[str, list[LowRank]] = {}
        self.are_taken = False

    def take(self) -> dict[str, list[LowRank]]:
        """Hand the adapters over to the forward that computes with them."""
        self.are_taken = True
        return self.by_weight
