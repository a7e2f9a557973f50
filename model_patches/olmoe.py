"""OLMoE, Qwen3-MoE, and the families whose routers have a forward equal to theirs, line by line."""

from .family import native_family, norm_topk_prob_weighting, softmax_family, softmax_scores

NATIVE = (("qwen3_moe", "Qwen3Moe"), ("olmoe", "Olmoe"))  # name, beginning of all its classes' names
SAME_ROUTER = (  # name, folder of transformers.models, beginning of the block's and the router's names, base class
    ("flex_olmo", "flex_olmo", "FlexOlmo", "FlexOlmoPreTrainedModel"),
    ("mellum", "mellum", "Mellum", "MellumPreTrainedModel"),
    ("qwen2_moe", "qwen2_moe", "Qwen2Moe", "Qwen2MoePreTrainedModel"),
    ("qwen3_next", "qwen3_next", "Qwen3Next", "Qwen3NextPreTrainedModel"),
    (
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe",
        "Qwen3OmniMoeThinkerText",
        "Qwen3OmniMoeThinkerTextPreTrainedModel",
    ),
    ("qwen3_omni_moe_talker", "qwen3_omni_moe", "Qwen3OmniMoeTalkerText", "Qwen3OmniMoePreTrainedModel"),
    ("qwen4_exp", "qwen4_exp", "Qwen4ExpText", "Qwen4ExpPreTrainedModel"),
)
FAMILIES = (
    *(
        native_family(
            name,
            prefix,
            block=f"{prefix}SparseMoeBlock",
            router=f"{prefix}TopKRouter",
            hub_layout="per_expert",
            scores=softmax_scores,
            weighting=norm_topk_prob_weighting,
        )
        for name, prefix in NATIVE
    ),
    *(
        softmax_family(name, prefix, pretrained, norm_topk_prob_weighting, folder)
        for name, folder, prefix, pretrained in SAME_ROUTER
    ),
)
