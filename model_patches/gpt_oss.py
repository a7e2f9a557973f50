"""gpt-oss (20b, 120b): softmax over the logits of the chosen experts.

Its experts' clamped gate is told from the module by sonicmoe_hf/patching/experts.py.
"""

from .family import NativeFamily, modeling_module, normalised_weighting, softmax_scores

GPT_OSS = NativeFamily(
    name="gpt_oss",
    module=modeling_module("gpt_oss"),
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
    weighting=normalised_weighting,
)
FAMILIES = (GPT_OSS,)
