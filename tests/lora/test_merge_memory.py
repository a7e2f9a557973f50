"""Merging a checkpoint of 1.2 GB takes the memory of a shard, of a file of the base and of a layer's adapter, not of the model."""

from functools import partial

import pytest
import torch
from helpers.memory import bytes_in, peak_of_a_process, reads_peaks
from helpers.small_families import adapted_names
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from sonicmoe_hf import merge_adapter

SIZES = {
    "vocab_size": 4096, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "moe_intermediate_size": 512, "intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4,
}  # fmt: skip
SHARD = 200_000_000
HEADROOM = 150_000_000  # the model's modules and names, an expert's matrices in fp32, a layer's factors


@pytest.mark.slow
@reads_peaks
def test_the_peak_is_two_files_and_not_the_model(tmp_path):
    with torch.device("meta"):  # random values take longer than the merge
        model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**SIZES), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for weight in model.state_dict().values():
        weight.fill_(0.01)
    model.save_pretrained(tmp_path / "base", max_shard_size=SHARD)
    modules, parameters = adapted_names(model)
    config = LoraConfig(r=8, target_modules=modules, target_parameters=parameters, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    del model
    merge = partial(merge_adapter, tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", max_shard_size=SHARD)
    peak = peak_of_a_process(merge)
    assert bytes_in(tmp_path / "merged") > 1.2e9 and peak < 2 * SHARD + HEADROOM, f"{peak / 1e6:.0f} MB"
