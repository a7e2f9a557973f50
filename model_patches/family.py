"""The facts of a model family, and the formulas that families share.

Letters: T tokens, E experts, G groups of N experts. Scores and weights are fp32 until the family's own final cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from sonicmoe_hf.kernels.interface import Weighting
from sonicmoe_hf.kernels.rounding import set_weights


class TokenTypes(NamedTuple):
    """The tokens that a block computes: `vision_block`, by its last name, those where the model's argument `argument`
    [B, S] is not 0; others the rest."""

    argument: str
    vision_block: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """The facts of one family of Transformers models that token rounding, balancing and replay need.

    name: what sonicmoe_hf calls it: its model_type, where it has only one kind of block. module: where Transformers
        defines it. block, router, pretrained: class names there; `pretrained` is the base class of its models.
    router_attribute: what the block calls its router.
    token_types: where a module around several blocks gives each of them some of the tokens: which.
    table: the attribute, an expert's id [vocabulary, K] of integers, of routers that take a token's experts from there.
    scores(router, logits_TE) -> (scores_TE, ranking_TE): S of every expert for every token, fp32, differentiable; and
        what token rounding ranks by, -inf where an expert must never be added to the token.
    weighting(router) -> Weighting: the family's formula for the weights of a token's experts.
    """

    name: str
    module: str
    block: str
    router: str
    pretrained: str
    router_attribute: str = "gate"
    token_types: TokenTypes | None = None
    table: str | None = None
    scores: Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    weighting: Callable[[nn.Module], Weighting]

    def weights(self, router: nn.Module, scores_TE: torch.Tensor, mask_TE: torch.Tensor) -> torch.Tensor:
        """Compute weights_TE: the family's formula on each token's set, a mask; zeros elsewhere. Differentiable."""
        return set_weights(scores_TE, mask_TE, *self.weighting(router))

    def has_fixed_experts(self, router: nn.Module) -> bool:
        """Tell whether this router takes the experts of a token from a table, so that nothing may choose others."""
        return self.table is not None and hasattr(router, self.table)


@dataclass(frozen=True, kw_only=True)
class NativeFamily(Family):
    """A family with a native layout of its checkpoints too (sonicmoe_hf.checkpoints).

    experts, config, model, causal_lm: class names. hub_layout: how its checkpoints on the hub store experts, a name of
        sonicmoe_hf.checkpoints.layouts.detect_layout.
    """

    experts: str
    config: str
    model: str
    causal_lm: str
    hub_layout: str


def modeling_module(folder: str) -> str:
    """Name the module in which Transformers defines the models of this folder of transformers.models."""
    return f"transformers.models.{folder}.modeling_{folder}"


def softmax_scores(router: nn.Module, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute S = softmax over all experts, fp32."""
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    return scores_TE, scores_TE


def norm_topk_prob_weighting(router: nn.Module) -> Weighting:
    """Compute S, divided by its sum where the router says norm_topk_prob."""
    return Weighting(normalised=bool(router.norm_topk_prob))


def normalised_weighting(router: nn.Module) -> Weighting:
    """Compute S, divided by its sum. Softmax over the chosen logits equals this too."""
    return Weighting(normalised=True)


def family(name: str, block: str, router: str, pretrained: str, folder: str | None = None, **facts) -> Family:
    """Make a family of its classes' names. folder: of transformers.models, where it is not `name`."""
    module = modeling_module(folder or name)
    return Family(name=name, module=module, block=block, router=router, pretrained=pretrained, **facts)


def softmax_family(
    name: str, prefix: str, pretrained: str, weighting: Callable[[nn.Module], Weighting], folder: str | None = None
) -> Family:
    """Make a family with softmax scores whose block and router are `prefix`SparseMoeBlock and `prefix`TopKRouter."""
    block, router = f"{prefix}SparseMoeBlock", f"{prefix}TopKRouter"
    return family(name, block, router, pretrained, folder, scores=softmax_scores, weighting=weighting)


def native_family(name: str, prefix: str, **facts) -> NativeFamily:
    """Make a family with a native layout, whose classes are all named `prefix` and what they are."""
    return NativeFamily(
        name=name,
        module=modeling_module(name),
        experts=f"{prefix}Experts",
        pretrained=f"{prefix}PreTrainedModel",
        config=f"{prefix}Config",
        model=f"{prefix}Model",
        causal_lm=f"{prefix}ForCausalLM",
        **facts,
    )


def only_in_groups(ranking_TE: torch.Tensor, group_scores_TG: torch.Tensor, topk_group: int) -> torch.Tensor:
    """Copy `ranking_TE`, with -inf for the experts of all but the `topk_group` groups with the highest scores."""
    chosen_TG = group_scores_TG.topk(topk_group, dim=-1, sorted=False).indices
    outside_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, chosen_TG, False)
    outside_TGN = outside_TG.unsqueeze(-1).expand(*outside_TG.shape, ranking_TE.shape[1] // outside_TG.shape[1])
    return ranking_TE.masked_fill(outside_TGN.flatten(1), float("-inf"))
