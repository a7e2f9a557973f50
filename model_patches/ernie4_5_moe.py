"""ERNIE 4.5, text and vision-language: softmax scores; its top-k adds a correction to S, while rounding ranks
by S itself."""

from sonicmoe_hf.errors import UnsupportedModelError

from .family import TokenTypes, Weighting, family, softmax_family, softmax_scores


def _weighting(router):
    # the router divides by max(sum, norm_min): with its 1e-12 by the sum
    if router.norm_min > 1e-6:
        raise UnsupportedModelError(
            f"moe_norm_min is {router.norm_min}, which token rounding takes for 0; it must be at most 1e-6"
        )
    return Weighting(normalised=True)


FAMILIES = (
    softmax_family("ernie4_5_moe", "Ernie4_5_Moe", "Ernie4_5_MoePreTrainedModel", _weighting),
    family(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeSparseMoeBlock",
        "Ernie4_5_VLMoeMoeTopKRouter",
        "Ernie4_5_VLMoePreTrainedModel",
        token_types=TokenTypes("moe_mm_token_type_ids", "vision_moe"),
        scores=softmax_scores,
        weighting=_weighting,
    ),
)
