"""OLMoE (allenai/OLMoE-1B-7B and its kin)."""

from .family import Family, norm_topk_prob_weighting, softmax_scores

FAMILY = Family(
    name="olmoe",
    module="transformers.models.olmoe.modeling_olmoe",
    block="OlmoeSparseMoeBlock",
    router="OlmoeTopKRouter",
    experts="OlmoeExperts",
    pretrained="OlmoePreTrainedModel",
    config="OlmoeConfig",
    model="OlmoeModel",
    causal_lm="OlmoeForCausalLM",
    hub_layout="per_expert",
    router_attribute="gate",
    scores=softmax_scores,
    weighting=norm_topk_prob_weighting,
)
