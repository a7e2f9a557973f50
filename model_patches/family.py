"""What is to be known of a model family, and the weighting formulas that families share.

Letters: T tokens, E experts. Scores and weights are fp32 until the family's own final cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Family:
    """The facts of one family of Transformers models.

    name: its model_type. module: where Transformers defines it. block, router, experts, pretrained, config, model,
        causal_lm: class names there.
    hub_layout: how its checkpoints on the hub store experts, a name of sonicmoe_hf.layouts.LAYOUTS.
    router_attribute: what the block calls its router.
    scores(router, logits_TE) -> (scores_TE, ranking_TE): S of every expert for every token, fp32, differentiable; and
        what token rounding ranks by, -inf where an expert must never be added to the token.
    weights(router, scores_TE, mask_TE) -> weights_TE: the family's weighting formula on each token's final set.
    """

    name: str
    module: str
    block: str
    router: str
    experts: str
    pretrained: str
    config: str
    model: str
    causal_lm: str
    hub_layout: str
    router_attribute: str
    scores: Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    weights: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def softmax_scores(router: nn.Module, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S = softmax over all experts, fp32."""
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    return scores_TE, scores_TE


def sum_normalised(scores_TE: torch.Tensor, mask_TE: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """S on the chosen set divided by its sum (+ epsilon); zeros, with finite gradients, where the set is empty."""
    chosen_TE = torch.where(mask_TE, scores_TE, 0.0)
    total_T1 = chosen_TE.sum(-1, keepdim=True)
    return chosen_TE / (torch.where(total_T1 > 0, total_T1, 1.0) + epsilon)


def norm_topk_prob_weights(router: nn.Module, scores_TE: torch.Tensor, mask_TE: torch.Tensor) -> torch.Tensor:
    """S on the chosen set, divided by its sum where the router says norm_topk_prob."""
    if router.norm_topk_prob:
        return sum_normalised(scores_TE, mask_TE)
    return torch.where(mask_TE, scores_TE, 0.0)
