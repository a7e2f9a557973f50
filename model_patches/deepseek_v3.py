"""DeepSeek-V3 and R1 (sigmoid scores, groups of experts, shared experts outside our reach)."""

import torch

from .family import Family, Weighting


def _scores(router, logits_TE):
    """S = sigmoid; ranked by S, but only inside the groups that the token's own top-k looks at."""
    scores_TE = logits_TE.float().sigmoid()
    with torch.no_grad():
        for_choice_TGN = (scores_TE + router.e_score_correction_bias).unflatten(-1, (router.num_group, -1))
        group_scores_TG = for_choice_TGN.topk(2, dim=-1).values.sum(-1)
        chosen_TG = group_scores_TG.topk(router.topk_group, dim=-1, sorted=False).indices
        outside_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, chosen_TG, False)
        outside_TE = outside_TG.unsqueeze(-1).expand_as(for_choice_TGN).flatten(1)
    return scores_TE, scores_TE.masked_fill(outside_TE, float("-inf"))


def _weighting(router):
    return Weighting(bool(router.norm_topk_prob), 1e-20, float(router.routed_scaling_factor))


FAMILY = Family(
    name="deepseek_v3",
    module="transformers.models.deepseek_v3.modeling_deepseek_v3",
    block="DeepseekV3MoE",
    router="DeepseekV3TopkRouter",
    experts="DeepseekV3Experts",
    pretrained="DeepseekV3PreTrainedModel",
    config="DeepseekV3Config",
    model="DeepseekV3Model",
    causal_lm="DeepseekV3ForCausalLM",
    hub_layout="per_expert",
    router_attribute="gate",
    scores=_scores,
    weighting=_weighting,
)
