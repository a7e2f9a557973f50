"""Mixtral and the families that also always divide S, a softmax over all experts, by its sum over the chosen ones."""

from .family import normalised_weighting, softmax_family

ALWAYS_NORMALISED = (  # model_type, beginning of the block's and the router's names, base class of the models
    ("mixtral", "Mixtral", "MixtralPreTrainedModel"),
    ("minimax", "MiniMax", "MiniMaxPreTrainedModel"),
    ("qwen3_vl_moe", "Qwen3VLMoeText", "Qwen3VLMoePreTrainedModel"),
    ("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoePreTrainedModel"),
)
FAMILIES = tuple(
    softmax_family(name, prefix, pretrained, normalised_weighting) for name, prefix, pretrained in ALWAYS_NORMALISED
)
