"""DeepSeek-V3 and R1 (sigmoid scores, groups of experts, shared experts outside our reach), and the families whose
routers have a forward equal to DeepSeek-V3's, line by line."""

import torch

from .family import Weighting, family, native_family, only_in_groups


def _scores(router, logits_TE):
    """Compute S = sigmoid; ranked by S, but only inside the groups that the token's own top-k looks at."""
    scores_TE = logits_TE.float().sigmoid()
    with torch.no_grad():
        for_choice_TGN = (scores_TE + router.e_score_correction_bias).unflatten(-1, (router.num_group, -1))
        group_scores_TG = for_choice_TGN.topk(2, dim=-1).values.sum(-1)
    return scores_TE, only_in_groups(scores_TE, group_scores_TG, router.topk_group)


def _weighting(router):
    return Weighting(bool(router.norm_topk_prob), 1e-20, float(router.routed_scaling_factor))


DEEPSEEK_V3 = native_family(
    "deepseek_v3",
    "DeepseekV3",
    block="DeepseekV3MoE",
    router="DeepseekV3TopkRouter",
    hub_layout="per_expert",
    scores=_scores,
    weighting=_weighting,
)
SAME_ROUTER = (  # model_type, block, router, base class of the models
    ("axk1", "AXK1MoE", "AXK1TopkRouter", "AXK1PreTrainedModel"),
    ("bailing_hybrid", "BailingHybridMoE", "BailingHybridTopkRouter", "BailingHybridPreTrainedModel"),
    ("deepseek_v32", "DeepseekV32MoE", "DeepseekV32TopkRouter", "DeepseekV32PreTrainedModel"),
    ("dots1", "Dots1MoE", "Dots1TopkRouter", "Dots1PreTrainedModel"),
    ("dots3_note", "Dots3NoteTextMoE", "Dots3NoteTextTopkRouter", "Dots3NotePreTrainedModel"),
    ("exaone_moe", "ExaoneMoeSparseMoEBlock", "ExaoneMoeTopkRouter", "ExaoneMoePreTrainedModel"),
    ("glm4_moe", "Glm4MoeMoE", "Glm4MoeTopkRouter", "Glm4MoePreTrainedModel"),
    ("glm4_moe_lite", "Glm4MoeLiteMoE", "Glm4MoeLiteTopkRouter", "Glm4MoeLitePreTrainedModel"),
    ("glm4v_moe", "Glm4vMoeTextMoE", "Glm4vMoeTextTopkRouter", "Glm4vMoePreTrainedModel"),
    ("glm5_next", "Glm5NextTextMoE", "Glm5NextTextTopkRouter", "Glm5NextPreTrainedModel"),
    ("glm_moe_dsa", "GlmMoeDsaMoE", "GlmMoeDsaTopkRouter", "GlmMoeDsaPreTrainedModel"),
    ("hy_v4", "HYV4MoE", "HYV4TopkRouter", "HYV4PreTrainedModel"),
    ("hy_v4_vl", "HYV4VLMoE", "HYV4VLTopkRouter", "HYV4VLPreTrainedModel"),  # Transformers 5.24
    ("kimi_linear", "KimiLinearMoE", "KimiLinearTopkRouter", "KimiLinearPreTrainedModel"),
    ("mimo_v2_flash", "MiMoV2FlashMoE", "MiMoV2FlashTopkRouter", "MiMoV2FlashPreTrainedModel"),
    ("nemotron_h", "NemotronHMoE", "NemotronHTopkRouter", "NemotronHPreTrainedModel"),
    ("solar_open", "SolarOpenMoE", "SolarOpenTopkRouter", "SolarOpenPreTrainedModel"),
)
FAMILIES = (
    DEEPSEEK_V3,
    *(family(*names, scores=_scores, weighting=_weighting) for names in SAME_ROUTER),
)
