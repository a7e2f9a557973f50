"""A number of ranks that does not divide the experts: refused by the config alone, with what works."""

import re

import pytest
import torch
from helpers.models import CONFIGS
from helpers.parallel import HAS_EP_SIZE
from transformers import Qwen3VLMoeConfig
from transformers.distributed import DistributedConfig

import sonicmoe_hf
from sonicmoe_hf import UnsupportedModelError
from sonicmoe_hf.demo.model import random_packed_model
from sonicmoe_hf.patching.ranks import check_ranks

EXPERTS = {
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}


def sizes_of(ranks, **others):
    """A DistributedConfig with experts shared by that many ranks."""
    options = {"ep_size": ranks} if HAS_EP_SIZE else {"enable_expert_parallel": True, "tp_size": ranks}
    return DistributedConfig(**options, **others)


@pytest.mark.parametrize("family", EXPERTS)
def test_the_error_comes_before_any_file_of_weights_is_asked_for(family, tmp_path):
    CONFIGS[family](**{EXPERTS[family]: 6}).save_pretrained(tmp_path)  # and nothing else
    match = "6 experts, of which 4 ranks .* start as many processes as divide 6"
    for options in ({}, {"experts_quantization": "nf4"}):
        with pytest.raises(UnsupportedModelError, match=match):
            sonicmoe_hf.from_pretrained(tmp_path, distributed_config=sizes_of(4, fsdp_size=4), **options)


def test_random_models_are_refused_before_a_weight_is_made():
    with pytest.raises(UnsupportedModelError, match="6 experts, of which 4 ranks"):
        random_packed_model(CONFIGS["qwen3_moe"](num_experts=6), "nf4", distributed_config=sizes_of(4, fsdp_size=4))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("experts", "given", "works"),
    [
        (60, {"fsdp_size": 8, "ep_size": 8}, "ep_size=4: then each expert is on 2 ranks"),
        (60, {"fsdp_size": 16, "ep_size": 16}, "ep_size=4: then each expert is on 4 ranks"),
        (60, {"fsdp_size": 4, "tp_size": 2, "ep_size": 8}, "ep_size=4: then each expert is on 2 ranks"),
        (60, {"fsdp_size": 2, "tp_size": 8, "ep_size": 8}, None),  # 4 is no multiple of tp_size
        (63, {"fsdp_size": 8, "ep_size": 8}, None),
    ],
)
def test_the_remedy_is_a_size_that_the_same_ranks_take(experts, given, works):
    with pytest.raises(UnsupportedModelError) as error:
        check_ranks(CONFIGS["qwen3_moe"](num_experts=experts), given)
    assert (works in f"{error.value}") if works else "or give" not in f"{error.value}"
    if works:
        size = int(re.search(r"give ep_size=(\d+)", f"{error.value}")[1])
        check_ranks(CONFIGS["qwen3_moe"](num_experts=experts), {**given, "ep_size": size})


@pytest.mark.parametrize("given", [{"fsdp_size": 3}, {"fsdp_size": 8, "ep_size": 2}, {"tp_size": 2, "ep_size": 2}])
def test_ranks_that_divide_the_experts_or_share_none_are_taken(given):
    check_ranks(CONFIGS["qwen3_moe"](num_experts=6), given)


def test_experts_of_a_models_text_part_are_counted():
    with pytest.raises(UnsupportedModelError, match="Qwen3VLMoeConfig has 6 experts, of which 4"):
        check_ranks(Qwen3VLMoeConfig(text_config={"num_experts": 6}), {"fsdp_size": 4, "ep_size": 4})
