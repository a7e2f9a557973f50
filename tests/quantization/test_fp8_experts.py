"""Transformers' FP8Experts, of a checkpoint that it loaded itself: patch_model takes their bytes.

Transformers' own kernels for them need a GPU, so the linear layers here are dense. Tolerances: 1e-6 where both sides
compute the same sums in fp32 in another order, 1e-5 of gradients, which sum over more.
"""

import copy

import pytest
import torch
from helpers.adapters import EXPERTS
from helpers.checkpoints import load_whole, make, same_bits, tensors_in, to_fp8
from helpers.models import ORDER_OF_SUMS, assert_all_close, batch, gradients_of
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import sonicmoe_hf
from sonicmoe_hf import PackedWeight, UnsupportedModelError
from sonicmoe_hf.kernels.quantized import dequantize, quantize

SIZES = {
    "qwen3_moe": {"hidden_size": 144, "moe_intermediate_size": 128, "num_hidden_layers": 2},
    "deepseek_v3": {"hidden_size": 144, "moe_intermediate_size": 128, "num_hidden_layers": 2},
}
DENSE = ["proj", "proj_with_mqa", "lm_head"]  # how the names of linear layers end
BATCH = batch(2, 8)


@pytest.fixture
def load(monkeypatch, tmp_path):
    """A function: a model of the family as Transformers loads its FP8 checkpoint, and the dense one that it stands for."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)

    def loaded(family, kind="fp32", **sizes):
        make(tmp_path / "fp8", family, **{**SIZES[family], **sizes})
        declared = {"scale_fmt": "ue8m0" if kind == "ue8m0" else "float", "modules_to_not_convert": DENSE}
        to_fp8(tmp_path / "fp8", kind, ".mlp.experts.", **declared)
        return [load_whole(tmp_path / name) for name in ("fp8", "dense")]

    return loaded


def fp8_experts(model):
    return [module for module in model.modules() if type(module).__name__ == "FP8Experts"]


@pytest.mark.parametrize("kind", ["fp32", "ue8m0"])
@pytest.mark.parametrize("family", SIZES)
def test_a_model_that_transformers_loaded_computes_with_its_own_bytes(load, family, kind, tmp_path):
    model, dense = load(family, kind)
    model.save_pretrained(tmp_path / "before")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert fp8_experts(model) and all(layer.accelerated for layer in sonicmoe_hf.supports(model))
    sonicmoe_hf.patch_model(model)
    packed = [experts.gate_up_proj for experts in fp8_experts(model)]
    assert {(type(weight), weight.format) for weight in packed} == {(PackedWeight, "fp8")}
    assert same_bits(model.state_dict(), before)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places, "nothing is copied"
    expected = dense(**BATCH).logits
    assert (model(**BATCH).logits - expected).norm() <= 1e-6 * expected.norm()
    model.save_pretrained(tmp_path / "after")
    assert same_bits(tensors_in(tmp_path / "after"), tensors_in(tmp_path / "before"))
    changed = copy.deepcopy(model)
    for weight in packed:
        weight.codes.zero_()
    model.load_state_dict(changed.state_dict())
    assert torch.equal(model(**BATCH).logits, changed(**BATCH).logits)
    sonicmoe_hf.unpatch_model(model)
    assert same_bits(model.state_dict(), before) and not any(
        isinstance(weight, PackedWeight) for weight in model.parameters()
    )


def test_their_bytes_go_to_host_memory_and_come_back(load):
    model, _ = load("qwen3_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sonicmoe_hf.patch_model(model)
    expected = model(**BATCH).logits
    sonicmoe_hf.patch_model(model, experts_memory=0)
    weights = [experts.gate_up_proj for experts in fp8_experts(model)]
    on_host = [weight.codes.data_ptr() for weight in weights]
    assert {type(weight).__name__ for weight in weights} == {"HostWeight"}
    assert torch.equal(model(**BATCH).logits, expected) and same_bits(model.state_dict(), before)
    sonicmoe_hf.unpatch_model(model)
    assert same_bits(model.state_dict(), before)
    assert all(experts.gate_up_proj.data_ptr() not in on_host for experts in fp8_experts(model))


def test_their_pairs_of_fp4_values_are_mxfp4(load):
    """As DeepSeek-V4's are stored: int8 [E, N, K / 2], and a power of two for 32 values, in E8M0."""
    model, dense = load("qwen3_moe", hidden_size=160)
    for experts, wanted in zip(fp8_experts(model), (layer.mlp.experts for layer in dense.model.layers)):
        for name in ("gate_up_proj", "down_proj"):
            packed = quantize(getattr(wanted, name).detach(), "mxfp4")
            setattr(experts, name, nn.Parameter(packed.codes.flatten(2).view(torch.int8), requires_grad=False))
            scales = nn.Parameter(packed.scales.view(torch.float8_e8m0fnu), requires_grad=False)
            setattr(experts, f"{name}_scale_inv", scales)
            getattr(wanted, name).data = dequantize(packed, "mxfp4", torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sonicmoe_hf.patch_model(model)
    assert {experts.down_proj.format for experts in fp8_experts(model)} == {"mxfp4"}
    expected = dense(**BATCH).logits
    assert (model(**BATCH).logits - expected).norm() <= 1e-6 * expected.norm()
    assert same_bits(model.state_dict(), before)


def test_what_a_state_dict_or_a_checkpoint_brings_them_is_looked_at(load):
    model, _ = load("qwen3_moe", "ue8m0")
    experts = fp8_experts(model)[0]
    experts.gate_up_proj.requires_grad_(False)
    experts.down_proj.requires_grad_(True)
    sonicmoe_hf.patch_model(model)
    state = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    state["down_proj_scale_inv"].view(torch.uint8)[2, 0, 0] = 255  # E8M0's NaN
    with pytest.raises(ValueError, match="down_proj_scale_inv has NaN"):
        experts.load_state_dict(state)
    sonicmoe_hf.unpatch_model(model)
    assert experts.down_proj.requires_grad and not experts.gate_up_proj.requires_grad


@pytest.mark.parametrize("patched_first", [True, False])
def test_adapters_train_beside_them(load, patched_first):
    model, dense = load("qwen3_moe")
    found = []
    for each in (model, dense):
        torch.manual_seed(0)
        if patched_first:
            sonicmoe_hf.patch_model(each)
        peft = get_peft_model(each, LoraConfig(r=4, target_modules=["o_proj"], target_parameters=EXPERTS))
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
                nn.init.normal_(parameter, std=0.05)
        sonicmoe_hf.patch_model(peft)
        peft.train()(**BATCH).loss.backward()
        found.append(gradients_of(peft))
    assert len(found[0]) >= 6
    assert_all_close(*found, 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize(
    "gate",
    [
        {},
        {"limit": 0.5},
        {"swiglu_alpha": 1.7, "swiglu_limit": 0.5},
        {"gate_softcap": 0.7, "up_softcap": 0.5},
    ],
    ids=["silu", "clamped silu", "clamped swiglu", "softcapped swiglu"],
)
def test_every_gate_that_their_attributes_ask_for_is_computed(load, gate):
    model, _ = load("qwen3_moe")
    experts = fp8_experts(model)[0]
    if not all(hasattr(experts, name) for name in gate):
        pytest.skip("this version of Transformers has no such gate")
    vars(experts).update(gate)
    sonicmoe_hf.patch_model(model)
    theirs = copy.deepcopy(experts)
    for name in ("gate_up_proj", "down_proj"):
        setattr(theirs, name, nn.Parameter(getattr(experts, name).dequantize()))  # their products take dense weights
    theirs.config = copy.deepcopy(experts.config)
    theirs.config._experts_implementation = "eager"
    x, index = torch.randn(12, 144), torch.rand(12, 8).topk(2).indices
    weights = torch.rand(12, 2)
    expected = theirs(x, index, weights)
    assert (experts(x, index, weights) - expected).norm() <= 1e-6 * expected.norm()
    plain = model.model.layers[1].mlp.experts
    plain.load_state_dict(experts.state_dict())
    assert (plain(x, index, weights) - expected).norm() > 0.01 * expected.norm() or not gate


def test_experts_without_a_gate_and_gates_of_another_activation_are_refused_with_the_remedy(load):
    model, _ = load("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    experts.limit, experts.act_fn = 0.5, nn.GELU()
    assert "its clamped gate has another activation than silu" in sonicmoe_hf.supports(model)[1].reason
    model.model.layers[1].mlp.experts = type(experts)(experts.config, (128, 128), has_gate=False)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp: .*it has no gate.*experts_quantization=\"fp8\""):
        sonicmoe_hf.patch_model(model)
    assert not any(isinstance(weight, PackedWeight) for weight in model.parameters())


def test_what_no_packed_weight_is_stays_refused_with_the_remedy(load):
    remedy = 'experts_quantization="fp8"'
    sound, _ = load("qwen3_moe")
    for attribute, value in (("activation_scheme", "static"), ("block_size", (64, 128)), ("block_size", None)):
        model = copy.deepcopy(sound)
        for experts in fp8_experts(model):
            setattr(experts, attribute, value)
        with pytest.raises(UnsupportedModelError, match=f"{attribute} is .*{value}.*{remedy}"):
            sonicmoe_hf.patch_model(model)
        assert not any(isinstance(weight, PackedWeight) for weight in model.parameters())
    model = copy.deepcopy(sound)
    fp8_experts(model)[1].gate_up_proj_scale_inv.data[2, 1, 0] = float("nan")
    words = r"layers\.1\.mlp\.experts: gate_up_proj_scale_inv has NaN"
    with pytest.raises(sonicmoe_hf.UnsupportedExpertsError, match=words):
        sonicmoe_hf.patch_model(model)
    assert not any(isinstance(weight, PackedWeight) for weight in model.parameters())
