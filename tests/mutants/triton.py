"""Of the Triton kernels, which run interpreted on a CPU, and of how they are launched."""

from . import Mutation

EVERY = "tests/kernels/test_triton.py::test_every_kernel_agrees_with_the_eager_backend"
HALF = "tests/kernels/test_half_precision.py"
DISPATCH = "tests/kernels/test_triton.py::test_dispatch_gives_the_rows_of_the_eager_backend"
GUARD = "tests/kernels/test_guard_pages.py"
LAUNCH = "tests/kernels/test_launch_keys.py"
RANK = "tests/kernels/test_rank.py"
ROUNDING = "tests/kernels/test_rounding.py"

MUTATIONS = [
    Mutation(
        "kernels/triton/gemm_common.py",
        "        product = tl.dot(a, b, product, input_precision=PRECISION)\n        a_pointers += DEPTH * A_STEP",
        "        product = tl.dot(a, b, product, input_precision=PRECISION).to(a.dtype).to(tl.float32)\n"
        "        a_pointers += DEPTH * A_STEP",
        "the product is rounded to the inputs' dtype after every step of the main loop",
        HALF,
    ),
    Mutation(
        "kernels/triton/combine.py",
        "            total += value\n",
        "            total = (total + value).to(out.dtype.element_ty).to(tl.float32)\n",
        "combine rounds its sum after every row",
        HALF,
    ),
    Mutation(
        "kernels/triton/gemm_rank.py",
        "        product = tl.dot(tl.trans(wide), rows_j, product, input_precision=PRECISION)\n",
        "        product = tl.dot(tl.trans(wide), rows_j, product, input_precision=PRECISION).to(wide.dtype).to(tl.float32)\n",
        "dB is rounded to the inputs' dtype after every block of rows, though it arrives in fp32",
        f"{HALF} {RANK}",
    ),
    Mutation(
        "kernels/triton/bias_gradient.py",
        "            total += value.to(tl.float32)\n        else:",
        "            total = (total + value.to(tl.float32)).to(value.dtype).to(tl.float32)\n        else:",
        "the gradient of the bias is rounded after every block of rows",
        HALF,
    ),
    Mutation(
        "kernels/triton/dispatch.py",
        "return tl.where((found < 0) | (found >= NUM_EXPERTS), NUM_EXPERTS, found).to(tl.int32)",
        "return tl.where(found >= NUM_EXPERTS, NUM_EXPERTS, found).to(tl.int32)",
        "an expert id of -1 is taken for an expert",
        DISPATCH,
    ),
    Mutation(
        "kernels/triton/dispatch.py",
        "is_token = (owner >= 0) & (owner < num_tokens)",
        "is_token = owner < num_tokens",
        "a pair of token -1 is counted before the first token's",
        "tests/kernels/test_triton.py::test_dispatch_asserts_that_tokens_of_pairs_with_an_expert_are_there",
    ),
    Mutation(
        "kernels/triton/dispatch.py",
        "found = tl.load(expert + pair, mask=pair < num_pairs, other=0).to(tl.int64)",
        "found = tl.load(expert + pair, mask=pair < num_pairs + 1, other=0).to(tl.int64)",
        "dispatch reads one expert id past the end",
        GUARD,
    ),
    Mutation(
        "kernels/triton/dispatch.py",
        "is_known = is_token | (found == NUM_EXPERTS) | ~is_pair",
        "is_known = is_token | ~is_pair",
        "pairs without an expert must name a token, too",
        "tests/kernels/test_triton.py::test_dispatch_asserts_that_tokens_of_pairs_with_an_expert_are_there",
    ),
    Mutation(
        "kernels/triton/combine.py",
        "    if not num_rows or not num_tokens:",
        "    if not num_rows:",
        "combine divides by the number of tokens where there are pairs and no tokens",
        "tests/kernels/test_triton.py::test_pairs_without_tokens_have_rows_of_no_token",
    ),
    Mutation(
        "kernels/triton/combine.py",
        "mask=first + entry < end, other=num_rows)",
        "mask=first + entry <= end, other=num_rows)",
        "combine reads one row past the last token's",
        f"{GUARD} {EVERY}",
    ),
    Mutation(
        "kernels/triton/gemm_rank.py",
        "    source_row = tl.minimum(row, end - 1)  # past the end: as in gemm_up\n",
        "    source_row = row\n",
        "u and v read rows past an expert's end",
        GUARD,
    ),
    Mutation(
        "kernels/triton/bias_gradient.py",
        "is_read = (row < end)[:, None] & (column < N)[None, :]",
        "is_read = (row < end)[:, None] & (column <= N)[None, :]",
        "the gradient of the bias reads one column past the end",
        GUARD,
    ),
    Mutation(
        "kernels/triton/launch.py",
        "            kinds.append(tensor.dtype)\n",
        "            kinds.append(0)\n",
        "a kernel that was compiled for bf16 is launched with fp32",
        LAUNCH,
    ),
    Mutation(
        "kernels/triton/launch.py",
        "            kinds.append(None)\n",
        "            kinds.append(torch.float32)\n",
        "a kernel that was compiled for a tensor is launched without one",
        LAUNCH,
    ),
    Mutation(
        "kernels/triton/launch.py",
        "    if bits % 16 or max(numbers, default=0)",
        "    if bits % 8 or max(numbers, default=0)",
        "a kernel that was compiled for multiples of 16 bytes is launched with 8",
        LAUNCH,
    ),
    Mutation(
        "kernels/triton/launch.py",
        "key = (id(kernel), device, *kinds, *constants, *options.items())",
        "key = (id(kernel), *kinds, *constants, *options.items())",
        "a kernel that was loaded on one GPU is launched on another",
        LAUNCH,
    ),
    Mutation(
        "kernels/triton/launch.py",
        "max(numbers, default=0) >> 31 or",
        "max(numbers, default=0) >> 32 or",
        "a 64-bit number is handed to a kernel that was compiled for 32 bits",
        LAUNCH,
    ),
    Mutation(
        "kernels/triton/launch.py",
        "        if bits % 16 or self.launchable is None or hooks",
        "        if self.launchable is None or hooks",
        "a launcher hands tensors off alignment to a kernel that was compiled for multiples of 16 bytes",
        LAUNCH,
    ),
    Mutation(
        "kernels/triton/rounding_backward.py",
        "            totals += score\n",
        "            totals = score\n",
        "a token's scores are not summed over more than 16 experts",
        ROUNDING,
    ),
    Mutation(
        "kernels/triton/activations.py",
        "1.5957691216057308 * (1 + 0.134145 * square)",
        "1.5957691216057308 * (1 + 0.044715 * square)",
        "the slope of geglu_tanh lacks a factor of its cubic term",
        "tests/kernels/test_triton.py::test_activations_and_their_slopes_agree_with_the_eager_backend",
    ),
    Mutation(
        "kernels/triton/activations.py",
        "return tl.where(h <= 0, 0.0, h), tl.where(h <= 0, 0.0, da)",
        "return tl.where(h <= 0, 0.0, h), tl.where(h < 0, 0.0, da)",
        "relu has a slope at zero",
        "tests/kernels/test_ungated.py::test_activations_and_their_slopes_agree_with_the_eager_backend",
    ),
]
