"""Of the layer in plain PyTorch: the eager backend, adapters, packed weights."""

from . import Mutation

FUNCTIONAL = "tests/layer/test_moe_experts.py"
LOW_RANK = "tests/layer/test_lora_operands.py"
QUANTIZED = "tests/kernels/test_quantized.py"

MUTATIONS = [
    Mutation(
        "kernels/eager.py",
        "missing_P = (expert_P < 0) | (expert_P >= num_experts)",
        "missing_P = expert_P >= num_experts",
        "an expert id of -1 is taken for an expert",
        "tests/layer/test_dispatch.py",
    ),
    Mutation(
        "kernels/eager.py",
        "gradient[e] = dh_R2I[span].sum(0, dtype=accumulation_dtype(dh_R2I.dtype))",
        "gradient[e] = dh_R2I[span].sum(0, dtype=torch.float32)",
        "the gradient of a bias in fp64 is summed in fp32",
        f"{FUNCTIONAL}::test_it_agrees_with_the_reference_and_its_gradients_with_finite_differences",
    ),
    Mutation(
        "kernels/eager.py",
        "        rank_PJ = (weight_R1 * rank_PJ).to(rank_PJ.dtype)\n",
        "        pass\n",
        "dB of down's adapter lacks the routing weights",
        f"{LOW_RANK}::test_it_agrees_with_merged_weights_and_its_gradients_with_finite_differences",
    ),
    Mutation(
        "kernels/eager.py",
        "    dtype = accumulation_dtype(y_RH.dtype)\n    out_TH",
        "    dtype = y_RH.dtype\n    out_TH",
        "combine sums in the outputs' dtype",
        f"{FUNCTIONAL}::test_lower_precision_stays_near_the_fp32_reference",
    ),
    Mutation(
        "sonicmoe_hf/layer/lora_operands.py",
        "one.b.to(dtype) * one.scale for one in by_expert",
        "one.b.to(dtype) * adapter[0].scale for one in by_expert",
        "adapters of one weight all get the first one's scale",
        f"{LOW_RANK}::test_adapters_of_one_weight_add_up_each_with_its_own_scale",
    ),
    Mutation(
        "sonicmoe_hf/layer/lora_operands.py",
        "factors = (factor for one in adapter for factor in (one.a, one.b))",
        "factors = [adapter[0].a]",
        "adapters of one weight are added up in fp32, though one of the factors is fp64",
        f"{LOW_RANK}::test_adapters_of_one_weight_add_up_in_fp64_if_any_of_their_factors_is",
    ),
    Mutation(
        "kernels/eager.py",
        "unknown_P = ~missing_P & ((token_P < 0) | (token_P >= num_tokens))",
        "unknown_P = ~missing_P & (token_P < 0)",
        "a token past the last one is taken for none",
        "tests/layer/test_dispatch.py::test_a_token_that_is_not_there_is_named",
    ),
    Mutation(
        "sonicmoe_hf/layer/lora_operands.py",
        "is_copied = (rank, source_dtype, source_strides) != (padded, dtype, strides)",
        "is_copied = (rank, source_strides) != (padded, strides)",
        "an adapter in fp32 whose rank is a multiple of 8 is read as the experts' bf16",
        f"{LOW_RANK} tests/kernels/test_rank.py",
    ),
    Mutation(
        "kernels/quantized.py",
        "        block = torch.arange(first, first + num_scales, device=codes.device) // SCALES_PER_SCALE\n",
        "        block = torch.arange(num_scales, device=codes.device) // SCALES_PER_SCALE\n",
        "NF4's scales of every expert are the first one's",
        QUANTIZED,
    ),
    Mutation(
        "kernels/quantized.py",
        "    if not bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all()):",
        "    if bool(torch.isnan(weight).any()):",
        "infinite weights are packed",
        QUANTIZED,
    ),
    Mutation(
        "kernels/minifloat.py",
        "    bounds[1::2] = bounds[1::2].nextafter(bounds.new_zeros(()))",
        "    bounds[0::2] = bounds[0::2].nextafter(bounds.new_zeros(()))",
        "MXFP4 rounds ties to odd",
        QUANTIZED,
    ),
]
