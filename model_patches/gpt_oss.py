"""gpt-oss (20b, 120b), and Granite: softmax over the logits of the chosen experts.

gpt-oss's clamped gate is told from the module by sonicmoe_hf/patching/experts.py.
"""

from .family import Family, NativeFamily, modeling_module, normalised_weighting, softmax_scores

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
GRANITE = (  # model_type, beginning of its classes' names
    ("granitemoe", "GraniteMoe"),
    ("granitemoe_swa", "GraniteMoeSWA"),
    ("granitemoehybrid", "GraniteMoeHybrid"),
    ("granitemoeshared", "GraniteMoeShared"),
)
FAMILIES = (
    GPT_OSS,
    *(
        Family(
            name=name,
            module=modeling_module(name),
            block=f"{prefix}MoE",
            router=f"{prefix}TopKRouter",
            pretrained=f"{prefix}PreTrainedModel",
            router_attribute="router",
            scores=softmax_scores,
            weighting=normalised_weighting,
        )
        for name, prefix in GRANITE
    ),
)
