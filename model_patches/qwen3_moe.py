"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B and their kin)."""

from .family import Family, norm_topk_prob_weighting, softmax_scores

FAMILY = Family(
    name="qwen3_moe",
    module="transformers.models.qwen3_moe.modeling_qwen3_moe",
    block="Qwen3MoeSparseMoeBlock",
    router="Qwen3MoeTopKRouter",
    experts="Qwen3MoeExperts",
    pretrained="Qwen3MoePreTrainedModel",
    config="Qwen3MoeConfig",
    model="Qwen3MoeModel",
    causal_lm="Qwen3MoeForCausalLM",
    hub_layout="per_expert",
    router_attribute="gate",
    scores=softmax_scores,
    weighting=norm_topk_prob_weighting,
)
