"""Of what patching does in a model call: balance, calls and their threads, adapters, conversion, the 4-bit quantizer."""

from . import Mutation

BALANCE = "tests/patching/test_balance.py"
THREADS = "tests/patching/test_threads.py"

MUTATIONS = [
    Mutation(
        "sonicmoe_hf/patching/balance.py",
        "(counted_E.sum() - counted_E.numel() * counted_E).sign()",
        "(counted_E.median() - counted_E).sign()",
        "biases follow the median and not the mean",
        BALANCE,
    ),
    Mutation(
        "sonicmoe_hf/patching/balance.py",
        "(counted_E.sum() - counted_E.numel() * counted_E).sign()",
        "((counted_E.sum() >= counted_E.numel() * counted_E) * 2 - 1)",
        "the bias of an expert that has the mean rises",
        BALANCE,
    ),
    Mutation(
        "sonicmoe_hf/patching/balance.py",
        "(counted_E.sum() - counted_E.numel() * counted_E).sign()",
        "(counted_E.float().mean() - counted_E.float()).sign()",
        "of large counts that are equal some are above the mean",
        BALANCE,
    ),
    Mutation(
        "sonicmoe_hf/patching/balance.py",
        "        counted_E.add_(now_E)\n",
        "        counted_E.copy_(now_E)\n",
        "biases follow the last micro-batch alone",
        f"{BALANCE} tests/trainer/test_balancing.py::test_biases_follow_the_counts_of_a_whole_step_and_are_saved",
    ),
    Mutation(
        "sonicmoe_hf/patching/balance.py",
        "ones_TK = ones_TK * valid_T.to(dtype).unsqueeze(1)",
        "ones_TK = ones_TK * valid_T.any().to(dtype)",
        "padding counts",
        BALANCE,
    ),
    Mutation(
        "sonicmoe_hf/patching/balance.py",
        "count = valid_T.sum().clamp(min=1)",
        "count = valid_T.sum()",
        "a micro-batch of padding alone has a loss of NaN",
        BALANCE,
    ),
    Mutation(
        "sonicmoe_hf/patching/balance.py",
        "f_E / count * (probabilities_TE.sum(0) / count)",
        "f_E / count * (probabilities_TE.sum(0) / num_tokens)",
        "the mean of the probabilities counts padding",
        BALANCE,
    ),
    Mutation(
        "sonicmoe_hf/patching/active_adapters.py",
        "_thread = threading.local()  # given",
        '_thread = type("", (), {})()  # given',
        "adapters of one thread's call reach another's",
        "tests/lora/test_peft_wrapper.py::test_a_call_keeps_its_adapters_when_another_threads_ends_inside_it",
    ),
    Mutation(
        "sonicmoe_hf/patching/calls.py",
        "_thread = threading.local()  # forward",
        '_thread = type("", (), {})()  # forward',
        "a call of one thread is taken for part of another's",
        THREADS,
    ),
    Mutation(
        "sonicmoe_hf/patching/calls.py",
        "    if forward is None or forward.call.state is not state or forward.name != name:\n        return None\n",
        "    if forward is None:\n        return None\n",
        "a model whose call never began ends that of the model around it",
        "tests/patching/test_calls.py",
    ),
    Mutation(
        "sonicmoe_hf/patching/calls.py",
        "while outer is not None and outer.depth >= depth:",
        "while outer is not None and outer.depth > depth:",
        "a call that Ctrl-C interrupted is taken to be around the next",
        "tests/patching/test_threads.py::test_an_interrupted_call_is_forgotten_when_its_model_is_called_again",
    ),
    Mutation(
        "sonicmoe_hf/patching/handlers.py",
        "    if not run.forward.recomputing:\n        run.hook.balance.record(",
        "    if True:\n        run.hook.balance.record(",
        "balancing counts again what checkpointing recomputes",
        "tests/trainer/test_balancing.py::test_layers_that_are_recomputed_count_their_tokens_once",
    ),
    Mutation(
        "sonicmoe_hf/patching/padding.py",
        "valid_T = mask.reshape(-1) != 0",
        "valid_T = mask.reshape(-1) == 1",
        "sequences that a mask numbers above 1 are taken for padding",
        "tests/patching/test_padding.py",
    ),
    Mutation(
        "sonicmoe_hf/expert_parallel/collectives.py",
        "dist.ReduceOp.MAX",
        "dist.ReduceOp.SUM",
        "ranks agree on the sum of their numbers",
        "tests/expert_parallel/test_expert_parallel.py::test_ranks_agree_on_the_maximum_of_each_number",
    ),
    Mutation(
        "sonicmoe_hf/trainer/resume.py",
        "if id(state[name]) not in loaded_ids",
        "if name in state",
        "resuming warns of tied weights' second name",
        "tests/trainer/test_resume.py::test_tied_weights_stay_tied_and_the_name_that_is_not_saved_is_not_missed",
    ),
    Mutation(
        "sonicmoe_hf/patching/recorded.py",
        "torch.where((given_TK >= 0).all(-1, keepdim=True), given_TK, index_TK)",
        "torch.where(given_TK >= 0, given_TK, index_TK)",
        "a token with one id below 0 is replayed with experts of both",
        "tests/patching/test_replay.py::test_calls_are_replayed_in_order_and_tensors_do_too",
    ),
    Mutation(
        "sonicmoe_hf/lora/rules.py",
        "version < NOT_SWAPPED",
        "version <= NOT_SWAPPED",
        "adapters of PEFT 0.19.1 are refused",
        "tests/lora/test_merge.py::test_square_weights_of_a_peft_that_takes_in_for_in_are_merged",
    ),
    Mutation(
        "sonicmoe_hf/formats/format.py",
        "bool(torch.isfinite(tensor).all())",
        "not bool(torch.isnan(tensor).any())",
        "infinite scales of packed weights are taken",
        "tests/quantization/test_packed_checkpoints.py::test_damaged_packed_weights_are_errors_that_name_them",
    ),
    Mutation(
        "sonicmoe_hf/formats/declared.py",
        "[vars(config), vars(config.get_text_config())]",
        "[vars(config)]",
        "doctor does not see that a multimodal model's text model is quantized",
        "tests/cli/test_cli.py::test_doctor_finds_what_a_multimodal_config_declares_of_its_text_model",
    ),
    Mutation(
        "kernels/hopper/cache.py",
        'digest.update("\\n".join([*versions, sys.version]).encode())',
        "digest.update(sys.version.encode())",
        "kernels that another version compiled are loaded",
        "tests/kernels/test_hopper_cache.py::test_a_kernel_of_other_versions_sources_or_parameters_is_not_found",
    ),
    Mutation(
        "sonicmoe_hf/formats/sharding.py",
        "return PackedWeight(Quantized(codes, scales, state), format, param_dtype, is_transposed), ()",
        "return PackedWeight(Quantized(codes, scales, state), format, param_dtype), ()",
        "packed experts that are stored transposed come back from FSDP2 as if they were not",
        "tests/quantization/test_packed_ranks.py::"
        "test_fsdp2_shards_packed_experts_and_gives_the_unsharded_models_gradients",
    ),
]
