"""DeepSeek-V2, and the text models of DeepSeek-OCR-2 and Unlimited-OCR: softmax scores, groups ranked by their best."""

import torch

from .family import Weighting, family, only_in_groups, softmax_scores


def _scores(router, logits_TE):
    """Compute S = softmax; ranked by S, with `group_limited_greedy` only inside the groups with the best experts."""
    scores_TE, ranking_TE = softmax_scores(router, logits_TE)
    if router.topk_method == "group_limited_greedy":
        with torch.no_grad():
            group_scores_TG = scores_TE.unflatten(-1, (router.num_group, -1)).amax(-1)
        ranking_TE = only_in_groups(scores_TE, group_scores_TG, router.topk_group)
    return scores_TE, ranking_TE


def _weighting(router):
    return Weighting(False, 0.0, float(router.routed_scaling_factor))


SAME_ROUTER = (  # model_type, beginning of its classes' names
    ("deepseek_v2", "DeepseekV2"),
    ("deepseek_ocr2", "DeepseekOcr2Text"),
    ("unlimited_ocr", "UnlimitedOcrText"),
)
FAMILIES = tuple(
    family(
        name, f"{prefix}Moe", f"{prefix}TopkRouter", f"{prefix}PreTrainedModel", scores=_scores, weighting=_weighting
    )
    for name, prefix in SAME_ROUTER
)
