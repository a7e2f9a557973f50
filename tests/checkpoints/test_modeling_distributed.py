"""Native models on two gloo ranks: expert and tensor parallelism, FSDP2, and token rounding
refused where it cannot be."""

import pytest
from helpers.marks import rest_pinned
from helpers.models import assert_all_close, batch, build, build_patched, loss_and_gradients
from helpers.native import in_native_names, save_both
from helpers.parallel import PARTIAL_SUMS, gather, load_parallel, train_and_evaluate
from helpers.training import POLICY
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf.patching.moe_layers import find_layers


def parallel_step(rank, folder, kind):
    model = load_parallel(folder, kind)
    sonicmoe_hf.patch_model(model)
    experts = next(find_layers(model)).experts
    assert experts.num_experts == (4 if kind == "expert" else 8)
    assert hasattr(experts.c_fc, "placements") or kind == "tensor", "sharded, unless the family has no tensor plan"
    refused = bool(sonicmoe_hf.routing.why_no_rounding(model))
    return refused, train_and_evaluate(model, batch(padding=True))


@pytest.mark.parametrize("kind", ["expert", "tensor"])
@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss", "olmoe", "deepseek_v3"], 2))
def test_under_parallelism_of_the_experts_a_native_model_equals_the_unsharded_one(ranks, family, kind, tmp_path):
    model = build(family)
    _, folder = save_both(model, tmp_path)
    expected = in_native_names(train_and_evaluate(model, batch(padding=True)), family)
    for refused, actual in ranks.run(parallel_step, str(folder), kind):
        assert_all_close(actual, expected, 1e-5, PARTIAL_SUMS)
        assert refused or (family, kind) == ("gpt_oss", "tensor"), "its tensor plan leaves the experts whole"


def sharded_step(rank, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    sonicmoe_hf.patch_model(model, POLICY)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    found = loss_and_gradients(model.train(), batch())
    return {name: gather(tensor) for name, tensor in found.items()}


def test_under_fsdp2_token_rounding_gives_the_unsharded_models_gradients(ranks, tmp_path):
    model = build_patched("qwen3_moe", POLICY)
    _, folder = save_both(model, tmp_path)
    expected = in_native_names(loss_and_gradients(model, batch()), "qwen3_moe")
    for actual in ranks.run(sharded_step, str(folder)):
        assert_all_close(actual, expected, 1e-5, PARTIAL_SUMS)
