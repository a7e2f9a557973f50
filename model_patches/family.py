"""What is to be known of a model family, and the weighting formulas that families share.

Letters: T tokens, E experts. Scores and weights are fp32 until the family's own final cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from sonicmoe_hf.kernels.interface import Weighting
from sonicmoe_hf.kernels.rounding import set_weights


@dataclass(frozen=True, kw_only=True)
class Family:
    """The facts of one family of Transformers models.

    name: its model_type. module: where Transformers defines it. block, router, experts, pretrained, config, model,
        causal_lm: class names there.
    hub_layout: how its checkpoints on the hub store experts, a name of sonicmoe_hf.native.layouts.CHECKPOINT_LAYOUTS.
    router_attribute: what the block calls its router.
    scores(router, logits_TE) -> (scores_TE, ranking_TE): S of every expert for every token, fp32, differentiable; and
        what token rounding ranks by, -inf where an expert must never be added to the token.
    weighting(router) -> Weighting: the family's formula for the weights of a token's experts.
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
    weighting: Callable[[nn.Module], Weighting]

    def weights(self, router: nn.Module, scores_TE: torch.Tensor, mask_TE: torch.Tensor) -> torch.Tensor:
        """weights_TE: the family's formula on each token's set, a mask; zeros elsewhere. Differentiable."""
        return set_weights(scores_TE, mask_TE, *self.weighting(router))


def softmax_scores(router: nn.Module, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S = softmax over all experts, fp32."""
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    return scores_TE, scores_TE


def norm_topk_prob_weighting(router: nn.Module) -> Weighting:
    """S, divided by its sum where the router says norm_topk_prob."""
    return Weighting(normalised=bool(router.norm_topk_prob))
