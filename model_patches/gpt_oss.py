"""gpt-oss (20b, 120b): softmax over the logits of the chosen experts.

Its experts' clamped gate is told from the module by sonicmoe_hf/patching/experts.py.
"""

from .family import native_family, normalised_weighting, softmax_scores

GPT_OSS = native_family(
    "gpt_oss",
    "GptOss",
    block="GptOssMLP",
    router="GptOssTopKRouter",
    hub_layout="gpt_oss",
    router_attribute="router",
    scores=softmax_scores,  # raw logits are not comparable between tokens
    weighting=normalised_weighting,
)
FAMILIES = (GPT_OSS,)
