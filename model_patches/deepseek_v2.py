"""DeepSeek-V2, and the text models of DeepSeek-OCR-2 and Unlimited-OCR: softmax scores, groups ranked by their best."""

import torch

from .family import Weighting, family, only_in_groups, softmax_scores


def _scores(router, logits_TE):
    """S = softmax; ranked by S, with `group_limited_greedy` only inside the groups with the best experts."""
    scores_TE, ranking_TE = softmax_scores(router, logits_TE)
    if router.topk_method == "group_limited_greedy":
        with torch.no_grad():
            group_scores_TG = scores_TE.unflatten(-1, (router.num_group, -1)).amax(-1)
        ranking_TE = only_in_groups(scores_TE, group_scores_TG, router.topk_group)
    return scores_TE, ranking_TE


def _weighting(router):
    return Weighting(False, 0.0, float(router.routed_scaling_factor))


SAME_ROUTER = (  # model_type, block, router, base class of the models
    ("deepseek_v2", "DeepseekV2Moe", "DeepseekV2TopkRouter", "DeepseekV2PreTrainedModel"),
    ("deepseek_ocr2", "DeepseekOcr2TextMoe", "DeepseekOcr2TextTopkRouter", "DeepseekOcr2TextPreTrainedModel"),
    ("unlimited_ocr", "UnlimitedOcrTextMoe", "UnlimitedOcrTextTopkRouter", "UnlimitedOcrTextPreTrainedModel"),
)
FAMILIES = tuple(family(*names, scores=_scores, weighting=_weighting) for names in SAME_ROUTER)
