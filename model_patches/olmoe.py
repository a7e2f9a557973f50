"""OLMoE, Qwen3-MoE, and the families whose routers have a forward equal to theirs, line by line."""

from .family import NativeFamily, modeling_module, norm_topk_prob_weighting, softmax_family, softmax_scores

OLMOE = NativeFamily(
    name="olmoe",
    module=modeling_module("olmoe"),
    block="OlmoeSparseMoeBlock",
    router="OlmoeTopKRouter",
    experts="OlmoeExperts",
    pretrained="OlmoePreTrainedModel",
    config="OlmoeConfig",
    model="OlmoeModel",
    causal_lm="OlmoeForCausalLM",
    hub_layout="per_expert",
    scores=softmax_scores,
    weighting=norm_topk_prob_weighting,
)
QWEN3_MOE = NativeFamily(
    name="qwen3_moe",
    module=modeling_module("qwen3_moe"),
    block="Qwen3MoeSparseMoeBlock",
    router="Qwen3MoeTopKRouter",
    experts="Qwen3MoeExperts",
    pretrained="Qwen3MoePreTrainedModel",
    config="Qwen3MoeConfig",
    model="Qwen3MoeModel",
    causal_lm="Qwen3MoeForCausalLM",
    hub_layout="per_expert",
    scores=softmax_scores,
    weighting=norm_topk_prob_weighting,
)
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
    QWEN3_MOE,
    OLMOE,
    *(
        softmax_family(name, prefix, pretrained, norm_topk_prob_weighting, folder)
        for name, folder, prefix, pretrained in SAME_ROUTER
    ),
)
