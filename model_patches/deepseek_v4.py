"""DeepSeek-V4: sqrt(softplus) scores without groups. Its first layers have routers that look the experts of a token up in
a table, so that scores weigh them alone."""

import torch
import torch.nn.functional as F

from .family import Weighting, family


def _scores(router, logits_TE):
    """Compute S = sqrt(softplus), fp32."""
    scores_TE = F.softplus(logits_TE.to(torch.float32)).sqrt()
    return scores_TE, scores_TE


def _weighting(router):
    return Weighting(True, 1e-20, float(router.routed_scaling_factor))


FAMILIES = (
    family(
        "deepseek_v4",
        "DeepseekV4SparseMoeBlock",
        "DeepseekV4TopKRouter",
        "DeepseekV4PreTrainedModel",
        table="tid2eid",
        scores=_scores,
        weighting=_weighting,
    ),
)
