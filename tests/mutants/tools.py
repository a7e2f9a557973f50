"""Of `sonicmoe-hf plan` and `run`, and of what checkpoints and policies promise."""

from . import Mutation

MUTATIONS = [
    Mutation(
        "sonicmoe_hf/autopatch/session.py",
        "        finally:\n            self.thread.is_loading = False\n        model",
        "        finally:\n            pass\n        self.thread.is_loading = False\n        model",
        "after a load that failed no model is patched",
        "tests/autopatch/test_session.py::test_models_are_patched_after_one_that_could_not_be_loaded",
    ),
    Mutation(
        "sonicmoe_hf/autopatch/session.py",
        "has_weights = [model for model in models if any(not weight.is_meta for weight in model.parameters())]",
        "has_weights = models",
        "a model on the meta device is reported as trained",
        "tests/autopatch/test_session.py::test_models_without_weights_are_not_spoken_of",
    ),
    Mutation(
        "sonicmoe_hf/planning/ways.py",
        "fits=way.needed <= gpu_memory",
        "fits=way.memory.total / GIB <= gpu_memory",
        "what the allocator leaves unused counts as free",
        "tests/planning/test_plan.py::test_only_qlora_fits_qwen3_on_a_card_of_24_gib",
    ),
    Mutation(
        "sonicmoe_hf/planning/ways.py",
        'optimizer="adam8bit")\n            if not one and divides:',
        'optimizer="adam8bit")\n            if not one:',
        "expert parallelism is planned for ranks that do not divide the experts",
        "tests/planning/test_plan.py::test_experts_that_the_gpus_do_not_divide_are_not_split_over_them",
    ),
    Mutation(
        "sonicmoe_hf/planning/ways.py",
        '["DDP", "FSDP2"] if divides else ["DDP"]',
        '["DDP", "FSDP2"]',
        "FSDP2 over packed experts is planned for ranks that do not divide them",
        "tests/planning/test_plan.py::test_experts_that_the_gpus_do_not_divide_are_not_split_over_them",
    ),
    Mutation(
        "sonicmoe_hf/planning/ways.py",
        'is_plain = format == "nf4" and sizes.quantization is None',
        'is_plain = format == "nf4"',
        "linear layers of a quantized checkpoint are planned in NF4",
        "tests/planning/test_plan.py::test_a_quantized_checkpoint_is_planned_in_its_own_format_and_dequantized",
    ),
    Mutation(
        "sonicmoe_hf/layer/config.py",
        '"balanced": tile // 2,',
        '"balanced": 0,',
        "balanced rounding writes past its rows",
        "tests/layer/test_routing.py::test_balanced_rounding_may_take_half_a_tile_more_than_top_k",
    ),
    Mutation(
        "sonicmoe_hf/layer/config.py",
        "return num_tokens * top_k >= self.min_pairs(num_experts)",
        "return num_tokens * top_k > self.min_pairs(num_experts)",
        "exactly the tokens that rounding needs are too few",
        "tests/layer/test_routing.py::test_rounding_applies_from_the_mean_number_of_tiles_on",
    ),
    Mutation(
        "sonicmoe_hf/checkpoints/atomic_folder.py",
        "for place in (folder, *blobs)",
        "for place in (folder.parent, *blobs)",
        "a link to a file beside the checkpoint's folder is followed",
        "tests/checkpoints/test_atomic_folder.py",
    ),
    Mutation(
        "sonicmoe_hf/patching/divergence.py",
        "known_T &= mask.flatten().to(known_T)",
        "known_T &= True",
        "divergence counts padding",
        "tests/patching/test_served_routing.py",
    ),
]
