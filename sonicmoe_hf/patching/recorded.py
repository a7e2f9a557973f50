"""What was recorded of a model's routing, and a router's output with recorded experts.

Letters: L layers with experts, T tokens of a call, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..kernels.rounding import chosen_weights
from ..model_patches import Family


class RecordedRouting:
    """Which experts every token used, for each model call that was recorded, in their order.

    layers: names of the layers. calls: for each call, {layer: indices [T, K], int32}; T counts all positions of the
    batch, sequence by sequence, padding included.
    """

    def __init__(self, layers: Sequence[str]):
        self.layers = tuple(layers)
        self.calls: list[dict[str, torch.Tensor]] = []

    def tensors(self) -> list[torch.Tensor]:
        """The indices of each call as one tensor [L, T, K], int32, on the device of its first layer."""
        stacked = []
        for call in self.calls:
            indices = [call[name] for name in self.layers]
            stacked.append(torch.stack([index_TK.to(indices[0].device) for index_TK in indices]))
        return stacked

    def __repr__(self):
        return f"RecordedRouting({len(self.layers)} layers, {len(self.calls)} calls)"


class Replay:
    """What model calls take their experts from, one recorded call each."""

    def __init__(self, calls: Sequence[dict[str, torch.Tensor]]):
        self.calls = calls
        self.used = 0

    def next_call(self) -> dict[str, torch.Tensor]:
        """The experts of the next model call.

        Raises:
            RuntimeError: there are no more.
        """
        if self.used == len(self.calls):
            raise RuntimeError(f"replay_routing was given {len(self.calls)} model calls, and this is one more")
        self.used += 1
        return self.calls[self.used - 1]


def replayed(family: Family, router: nn.Module, output: tuple, given_TK: torch.Tensor) -> tuple:
    """The router's output (logits, weights, indices) with the experts of `given_TK`, and their weights by the family's
    formula from these logits. Tokens whose experts stay, and those with ids below 0, keep the router's own weights bit
    for bit.

    Raises:
        ValueError: `given_TK` is of another shape.
    """
    logits_TE, weights_TK, index_TK = output
    if given_TK.shape != index_TK.shape:
        raise ValueError(
            f"the replayed routing of a layer has shape {tuple(given_TK.shape)}, but this call's is "
            f"{tuple(index_TK.shape)}: [tokens, experts per token]"
        )
    given_TK = given_TK.to(index_TK)
    given_TK = torch.where((given_TK >= 0).all(-1, keepdim=True), given_TK, index_TK)
    scores_TK = family.scores(router, logits_TE)[0].gather(1, given_TK.long())
    chosen_TK = chosen_weights(scores_TK, *family.weighting(router)).to(weights_TK.dtype)
    same_T1 = (given_TK == index_TK).all(-1, keepdim=True)
    return logits_TE, torch.where(same_T1, weights_TK, chosen_TK), given_TK
