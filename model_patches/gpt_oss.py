"""gpt-oss (20b, 120b). Its experts' clamped gate is told from the module by sonicmoe_hf/experts.py."""

from .family import Family, Weighting, softmax_scores


def _weighting(router):
    # softmax over the chosen logits equals S / sum over the chosen set
    return Weighting(normalised=True)


FAMILY = Family(
    name="gpt_oss",
    module="transformers.models.gpt_oss.modeling_gpt_oss",
    block="GptOssMLP",
    router="GptOssTopKRouter",
    experts="GptOssExperts",
    pretrained="GptOssPreTrainedModel",
    config="GptOssConfig",
    model="GptOssModel",
    causal_lm="GptOssForCausalLM",
    hub_layout="gpt_oss",
    router_attribute="router",
    scores=softmax_scores,  # raw logits are not comparable between tokens
    weighting=_weighting,
)
