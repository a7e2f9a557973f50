"""Of the Hopper backend on the host: what falls back to Triton, and what kernels are called with."""

from . import Mutation

BACKEND = "kernels/hopper/__init__.py"
TESTS = "tests/kernels/test_hopper_host.py"

MUTATIONS = [
    Mutation(
        BACKEND,
        "tensor.data_ptr() % 16:",
        "tensor.data_ptr() % 8:",
        "operands 8 bytes off alignment reach kernels that copy 16",
        f"{TESTS}::test_operands_off_alignment_fall_back",
    ),
    Mutation(
        BACKEND,
        "gathered.numel() >= MAX_ELEMENTS",
        "gathered.numel() > MAX_ELEMENTS",
        "the offset of the last element does not fit into 32 bits",
        f"{TESTS}::test_gathered_tensors_of_two_to_the_31_elements_fall_back",
    ),
    Mutation(
        BACKEND,
        "num_parts * num_pairs < MAX_ELEMENTS",
        "num_pairs < MAX_ELEMENTS",
        "offsets into the parts of dw do not fit into 32 bits",
        f"{TESTS}::test_parts_of_dw_of_two_to_the_31_elements_fall_back",
    ),
    Mutation(
        BACKEND,
        "return same_dtype and aligned and rows.is_contiguous() and same_order and",
        "return same_dtype and aligned and rows.is_contiguous() and",
        "an adapter's factor in the other order is read as if it were in the weight's",
        f"{TESTS}::test_other_adapters_fall_back",
    ),
    Mutation(
        BACKEND,
        "(rows.data_ptr() | factor.data_ptr()) % 16",
        "rows.data_ptr() % 16",
        "an adapter's factor off alignment reaches TMA",
        f"{TESTS}::test_a_factor_off_alignment_and_a_rank_that_is_no_multiple_of_eight_fall_back",
    ),
    Mutation(
        BACKEND,
        "a_RI, parts, rows.pair, rows.token,",
        "a_RI, parts, rows.token, rows.pair,",
        "gemm_down_backward gets tokens for pairs",
        f"{TESTS}::test_what_the_kernels_are_called_with",
    ),
    Mutation(
        BACKEND,
        "return rows.tiles, rows.tiles.shape[0] - 1,",
        "return rows.tiles, rows.tiles.shape[0],",
        "the scheduler's state is looked for behind the table of tiles",
        f"{TESTS}::test_what_the_kernels_are_called_with",
    ),
    Mutation(
        BACKEND,
        "kernel = kernels[row_bucket(num_rows, num_experts)]",
        "kernel = kernels[0]",
        "the number of rows does not choose the tile",
        f"{TESTS}::test_the_number_of_rows_chooses_among_the_compiled_tiles",
    ),
    Mutation(
        BACKEND,
        "if tensor.get_device() == torch.cuda.current_device():",
        "if True:",
        "a kernel is launched on the current GPU, where its tensors may not be",
        f"{TESTS}::test_a_launch_is_on_the_tensor_s_gpu",
    ),
    Mutation(
        BACKEND,
        "lambda: triton.down_gradient(dout_TH, a_RI, rows, like_EHI).transpose(1, 2),",
        "lambda: triton.down_gradient(dout_TH, a_RI, rows, like_EHI),",
        "down's gradient comes back from Triton transposed",
        f"{TESTS}::test_operands_off_alignment_fall_back",
    ),
    Mutation(
        BACKEND,
        "all(n == 1 or s == form for",
        "all(s == form for",
        "the weights of one expert fall back for a stride that nothing reads",
        f"{TESTS}::test_the_weights_of_one_expert_alone_have_no_gaps_whatever_its_stride",
    ),
    Mutation(
        BACKEND,
        "kernel = kernels[is_short(rows.token.numel(), num_experts)]",
        "kernel = kernels[0]",
        "weight gradients of few rows take the tile of many",
        f"{TESTS}::test_the_number_of_rows_chooses_among_the_compiled_tiles",
    ),
    Mutation(
        BACKEND,
        "    inner = activation.inner(width)\n    sizes",
        "    inner = width // 2\n    sizes",
        "without a gate I is taken for 2I",
        f"{TESTS}::test_an_activation_without_a_gate_has_an_up_projection_of_i_rows",
    ),
    Mutation(
        BACKEND,
        "triton.routing_gradient(parts, dout_TH, bias_EH, rows) if want_dw",
        "triton.routing_gradient(parts, dout_TH, None, rows) if want_dw",
        "dw lacks the bias of down",
        f"{TESTS}::test_what_the_kernels_are_called_with",
    ),
    Mutation(
        "kernels/hopper/config.py",
        "mean_rows = -(-num_rows // num_experts)\n    return 2",
        "mean_rows = num_rows // num_experts\n    return 2",
        "the mean of rows that chooses a tile is rounded down",
        f"{TESTS}::test_the_number_of_rows_chooses_among_the_compiled_tiles",
    ),
    Mutation(
        "kernels/hopper/variants.py",
        "supports_sizes(hidden, activation.width(inner))",
        "supports_sizes(hidden, 2 * inner)",
        "without a gate 2I columns are asked after",
        "tests/kernels/test_warmup.py",
    ),
]
