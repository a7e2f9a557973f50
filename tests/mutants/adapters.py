"""Of low-rank adapters: served, converted, merged, and beside the layer's kernels."""

from . import Mutation

MUTATIONS = [
    Mutation(
        "sonicmoe_hf/lora/engines.py",
        "rank > VLLM_RANKS[-1]:",
        "rank >= VLLM_RANKS[-1]:",
        "vLLM's largest rank is refused",
        "tests/lora/test_served_adapter.py::test_ranks_that_vllm_has_are_taken_as_they_are",
    ),
    Mutation(
        "sonicmoe_hf/lora/engines.py",
        "for allowed in VLLM_RANKS if allowed >= rank",
        "for allowed in VLLM_RANKS if allowed > rank",
        "a rank that vLLM has gets the next larger one",
        "tests/lora/test_served_adapter.py::test_ranks_that_vllm_has_are_taken_as_they_are",
    ),
    Mutation(
        "sonicmoe_hf/lora/factors.py",
        "F.pad(gate.b, (0, up.rank)), F.pad(up.b, (gate.rank, 0))",
        "F.pad(gate.b, (0, up.rank)), F.pad(up.b, (0, gate.rank))",
        "gate's and up's factors meet the wrong rows of A",
        "tests/lora/test_served_adapter.py::test_gate_and_up_become_one_weight_with_the_same_products",
    ),
    Mutation(
        "sonicmoe_hf/lora/factors.py",
        "gate.a.shape == up.a.shape and gate.scale == up.scale and torch.equal(gate.a, up.a)",
        "gate.a.shape == up.a.shape and torch.equal(gate.a, up.a)",
        "up takes gate's scale where they share A",
        "tests/lora/test_served_adapter.py::test_gate_and_up_become_one_weight_with_the_same_products",
    ),
    Mutation(
        "sonicmoe_hf/lora/engines.py",
        "return alpha if len(scales) == 1 and isinstance(alpha, int) else rank",
        "return alpha if len(scales) == 1 else rank",
        "lora_alpha is no whole number",
        "tests/lora/test_served_adapter.py::test_lora_alpha_is_a_whole_number_of_the_file_whatever_the_scale",
    ),
    Mutation(
        "sonicmoe_hf/lora/factors.py",
        "return not (self.a.any() or self.b.any())",
        "return not self.b.any()",
        "an adapter whose B is still zero is left out",
        "tests/lora/test_served_adapter.py::test_an_adapter_as_it_begins_training_comes_back_whole",
    ),
    Mutation(
        "sonicmoe_hf/lora/factors.py",
        "rank, scales = max(factors.rank for factors in experts)",
        "rank, scales = experts[0].rank",
        "the first expert's rank is taken for all",
        "tests/lora/test_served_adapter.py::test_experts_of_several_ranks_and_scales_become_one_weight_with_the_same_products",
    ),
    Mutation(
        "sonicmoe_hf/lora/rules.py",
        "if tuple(shapes) == expected and not is_unclear:",
        "if True:",
        "factors of another rank than the config's are taken",
        "tests/lora/test_served_refusals.py::test_files_that_are_no_such_adapter_raise_with_the_name",
    ),
    Mutation(
        "sonicmoe_hf/lora/adapter.py",
        "zero = next(iter(own.values())).unchanging()",
        "zero = next(iter(own.values()))",
        "an expert without factors gets another's",
        "tests/lora/test_served_adapter.py::test_what_peft_saves_of_linear_experts_is_served_and_becomes_a_fused_adapter",
    ),
    Mutation(
        "kernels/triton/gemm_rank.py",
        "if N <= WIDTH:",
        "if N < WIDTH:",
        "dv is not scaled where one slice has every column",
        "tests/kernels/test_rank.py",
    ),
    Mutation(
        "kernels/triton/gemm_rank.py",
        "is_rank &= (row < end)[:, None]",
        "pass",
        "NaN behind the last row reaches the gradients of factors",
        "tests/kernels/test_rank.py",
    ),
    Mutation(
        "sonicmoe_hf/autopatch/session.py",
        "is_done = config.inference_mode or any(",
        "is_done = any(",
        "experts are added to an adapter that is loaded for inference",
        "tests/autopatch/test_session.py::test_a_saved_adapter_and_a_dense_model_are_left_alone",
    ),
    Mutation(
        "sonicmoe_hf/lora/merge.py",
        "    total = torch.addmm(matrix, factors.b, factors.a, alpha=factors.scale)",
        "    total = (matrix.bfloat16() + (factors.scale * factors.b @ factors.a).bfloat16()).float()",
        "the product is added in the dtype of the base",
        "tests/lora/test_merge.py::test_a_bf16_base_is_rounded_once",
    ),
]
