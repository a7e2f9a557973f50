"""Of routing: token rounding by its definition, weights of rounded routings, Routing."""

from . import Mutation

DEFINITION = "tests/layer/test_routing.py::test_the_definition_of_token_rounding"
ROUTING = "tests/layer/test_routing.py"

MUTATIONS = [
    Mutation(
        "kernels/rounding.py",
        "go_up = 2 * rest_E > tile",
        "go_up = 2 * rest_E >= tile",
        "half a tile is rounded up",
        DEFINITION,
    ),
    Mutation(
        "kernels/rounding.py",
        "bits = (scores_TE.float() + 0.0).view(torch.int32)",
        "bits = scores_TE.float().view(torch.int32)",
        "-0.0 ranks below 0.0",
        f"{ROUTING}::test_bf16_scores_rank_in_fp32_and_negative_zero_ties_with_zero",
    ),
    Mutation(
        "kernels/rounding.py",
        "return (ordered << 32) | (scores_TE.shape[0] - 1 - token_T1)",
        "return (ordered << 32) | token_T1",
        "between equal scores the higher token index ranks higher",
        DEFINITION,
    ),
    Mutation(
        "kernels/rounding.py",
        "n_E = torch.where(n_E - f_E > others_E, below_E, n_E)",
        "n_E = torch.where(n_E - f_E > others_E, f_E, n_E)",
        "an expert that too few others could fill up keeps a count that is no multiple of the tile",
        DEFINITION,
    ),
    Mutation(
        "kernels/rounding.py",
        "nearest = (2 * f_E.cumsum(0) + tile - 1) // (2 * tile) * tile",
        "nearest = (2 * f_E.cumsum(0) + tile) // (2 * tile) * tile",
        "balanced rounding rounds ties up",
        f"{ROUTING}::test_balanced_is_the_greedy_choice_that_keeps_the_total",
    ),
    Mutation(
        "kernels/rounding.py",
        "top_k_TE, other_TE = top_k_TE & valid_T1, other_TE & valid_T1",
        "top_k_TE = top_k_TE & valid_T1",
        "padding tokens fill up experts",
        DEFINITION,
    ),
    Mutation(
        "kernels/rounding.py",
        "        chosen_TE.sum(-1, keepdim=True) > 0, (gradient_TE",
        "        chosen_TE.sum(-1, keepdim=True) < 0, (gradient_TE",
        "the gradient of normalised weights lacks that of their sum",
        "tests/layer/test_moe_experts.py::test_gradcheck_with_token_rounded_routing",
    ),
    Mutation(
        "sonicmoe_hf/layer/routing.py",
        'if self.rows is None or (self.rows_backend == "eager" and backend != "eager"):',
        "if self.rows is None:",
        "rows without tiles are given to kernels that read tiles",
        ROUTING,
    ),
    Mutation(
        "sonicmoe_hf/layer/routing.py",
        "if weights is None or weights is self.weights or weights.dtype != self.weights.dtype:",
        "if weights is None or weights is self.weights:",
        "weights that mixed precision cast take the place of the exact ones",
        f"{ROUTING}::test_a_routing_takes_the_weights_that_came_beside_it_unless_they_were_cast",
    ),
]
