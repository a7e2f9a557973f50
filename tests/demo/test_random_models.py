"""Models with random weights at any sizes: what they hold, how it is made, and that they run."""

import math
import weakref

import pytest
import torch
from helpers.examples import TINY_SIZES
from helpers.marks import crossed
from helpers.memory import LiveBytes
from helpers.models import CONFIGS, batch
from helpers.small_families import small_config
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3NextConfig

import sonicmoe_hf
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.tools import random_models
from sonicmoe_hf.tools.random_models import random_model, random_packed_model

SIZES = {  # NF4 needs multiples of 64
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 64},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 192},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
}


@pytest.mark.parametrize("family, name", crossed(SIZES, FORMATS, everywhere=3))
def test_random_packed_models_run_and_one_expert_at_a_time_was_dense(family, name):
    config = CONFIGS[family](**{**SIZES[family], "num_hidden_layers": 2})
    with LiveBytes() as memory:
        model = random_packed_model(config, name, dtype=torch.bfloat16)
    packed = [weight for weight in model.parameters() if isinstance(weight, PackedWeight)]
    assert len(packed) == 2 * len(sonicmoe_hf.supports(model))
    assert {(weight.format, weight.dtype, weight.device.type) for weight in packed} == {(name, torch.bfloat16, "cpu")}
    stored = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    one_expert = max(weight.shape[1:].numel() for weight in packed)
    assert memory.peak <= stored + 10 * 4 * one_expert, "an expert in fp32, and what packing makes of it"
    for weight in packed:
        std = weight.dequantize(torch.float32).std() / config.initializer_range
        assert 0.97 < std < 1.03, "about as large as the model would initialise them"
    sonicmoe_hf.patch_model(model)
    inputs = batch()
    loss = model(**inputs).loss.item()
    assert abs(loss - math.log(config.vocab_size)) < 0.5, "untrained: every token is about as probable"


def test_a_router_that_its_block_initialises_is_no_memory_that_was_left_there(monkeypatch):
    to_empty = nn.Module.to_empty

    def poisoned(module, **options):
        to_empty(module, **options)
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.data.fill_(math.nan if tensor.is_floating_point() else 0)

    monkeypatch.setattr(nn.Module, "to_empty", poisoned)
    config = small_config(Qwen3NextConfig, {"hidden_size": 64, "moe_intermediate_size": 64})
    model = random_packed_model(config, "nf4")
    sonicmoe_hf.patch_model(model)
    router = next(layer.router for layer in find_layers(model))
    assert 0.5 < router.weight.std() / model.config.initializer_range < 2
    assert model(input_ids=torch.arange(16)[None]).logits.isfinite().all()


def test_a_random_model_is_made_on_the_cpu_where_torch_has_cuda_and_the_machine_no_gpu(tmp_path, monkeypatch):
    def accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    Qwen3MoeConfig(**TINY_SIZES).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", accelerator)
    model = random_model(str(tmp_path))
    assert model.device.type == "cpu" and model.model.rotary_emb.inv_freq.device.type == "cpu"


@pytest.mark.parametrize("linear", [None, "nf4"])
def test_a_random_model_in_4_bits_is_what_the_unpacked_one_is_but_for_its_weights(linear):
    if linear is not None:
        pytest.importorskip("bitsandbytes")
    config = Qwen3MoeConfig(**{**TINY_SIZES, "hidden_size": 64, "moe_intermediate_size": 64})
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    packed = random_packed_model(config, "nf4", linear, dtype=torch.bfloat16)
    assert torch.equal(packed.model.rotary_emb.inv_freq, dense.model.rotary_emb.inv_freq)
    for (name, weight), expected in zip(packed.named_parameters(), dense.parameters(), strict=True):
        if ".experts." in name:
            assert isinstance(weight, PackedWeight)
            weight = weight.dequantize()
        is_linear = "self_attn" in name and "norm" not in name
        assert (weight.dtype == torch.uint8) == (is_linear and linear is not None)
        if weight.dtype != torch.uint8:
            assert weight.shape == expected.shape and weight.dtype == expected.dtype
            torch.testing.assert_close(weight.float().std(), expected.float().std(), rtol=0.2, atol=0.0)
    sonicmoe_hf.patch_model(packed)
    adapted = get_peft_model(packed, sonicmoe_hf.lora_config(packed, 2))
    tokens = torch.randint(300, (2, 16))
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    trained = {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * (4 + 2) and all(gradient is not None for gradient in trained.values())


def test_a_random_linear_layer_is_gone_before_the_next_is_packed(monkeypatch):
    pytest.importorskip("bitsandbytes")
    pack, unpacked = random_models._linear_in_4_bits, []

    def packing_alone(linear, quant_type):
        assert not any(weight() is not None for weight in unpacked)
        unpacked.append(weakref.ref(linear.weight))
        return pack(linear, quant_type)

    monkeypatch.setattr(random_models, "_linear_in_4_bits", packing_alone)
    config = Qwen3MoeConfig(**{**TINY_SIZES, "hidden_size": 64, "moe_intermediate_size": 64})
    random_packed_model(config, "nf4", "nf4", dtype=torch.bfloat16)
    assert len(unpacked) == config.num_hidden_layers * 4
