"""Adapters in the forms that vLLM and SGLang load: applied by the engines' own rule they are PEFT's merge in memory."""

import re
from unittest import mock

import pytest
import torch
from helpers.adapters import EXPERTS, NATIVE_EXPERTS, adapt, save_with_factors
from helpers.checkpoints import FAMILIES, same_bits, tensors_in
from helpers.engine_adapters import (
    FAMILIES_IN_SGLANG,
    FAMILIES_IN_VLLM,
    OTHERS,
    UNEVEN,
    adapter_config,
    config_for_vllm,
    merge_by_peft,
    save_base,
    split_experts,
)
from helpers.marks import rest_pinned
from helpers.models import ORDER_OF_SUMS, assert_all_close, build
from helpers.native import save_both
from helpers.small_families import small_model
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import convert_adapter
from sonicmoe_hf.adapters import adapter
from sonicmoe_hf.lora.factors import Factors, fuse_gate_and_up, stack_experts
from sonicmoe_hf.tools.cli.main import main

THREE_DIMENSIONAL = ("gpt_oss", "qwen3_vl_moe")  # whose experts vLLM holds as one weight


def products_of(adapter, family):
    """Compute alpha / r * B A by the matrix's name in the hub's checkpoint, written apart from the package; also of the
    form in which vLLM holds fused experts: [r*E, in], the expert slowest; [out, r*E], the expert fastest."""
    config, factors = adapter_config(adapter), tensors_in(adapter)
    scale, split = config["lora_alpha"] / config["r"], {}
    assert not config["use_rslora"] and not config["rank_pattern"] and not config["alpha_pattern"]
    assert isinstance(config["lora_alpha"], int), "whatever the scale: rsLoRA's of rank 2 is no whole number over 2"
    for key, a in factors.items():
        module, is_a, _ = key.removeprefix("base_model.model.").partition(".lora_A.weight")
        if not is_a:
            continue
        b = factors[key.replace("lora_A", "lora_B")]
        parameter = module.replace(".experts.base_layer", ".experts.gate_up_proj")
        parameter = re.sub(r"\.experts$", ".experts.down_proj", parameter)
        if parameter == module:
            assert a.shape[0] == b.shape[1] == config["r"]
            split[f"{module}.weight"] = scale * b @ a
        else:
            num_experts = a.shape[0] // config["r"]
            a, b = a.view(num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, num_experts).permute(2, 0, 1)
            assert a.shape[1] == b.shape[2] == config["r"]
            product = scale * (b @ a)
            split |= split_experts({parameter: product.transpose(1, 2) if family == "gpt_oss" else product}, family)
    return split


def assert_served_is(expected, base, adapter, family):
    """Check that the base's tensors with the adapter's products, each added where its name says, are these of a
    checkpoint."""
    weights, products = split_experts(tensors_in(base), family), products_of(adapter, family)
    assert products.keys() <= weights.keys()
    merged = {name: weight + products[name] if name in products else weight for name, weight in weights.items()}
    assert_all_close(merged, split_experts(expected, family), 1e-5, ORDER_OF_SUMS)


def there_and_back(folder, engine="vllm", **options):
    """Convert folder/adapter for the engine, in folder/vllm or folder/sglang, and back
    from there."""
    convert_adapter(folder / "adapter", folder / engine, engine, trained_on=folder / "base", **options)
    convert_adapter(folder / engine, folder / f"{engine} back", "hub", trained_on=folder / "base")
    return tensors_in(folder / f"{engine} back")


@pytest.mark.parametrize(
    "name, options",
    [
        *rest_pinned(((name, {}) for name in (*FAMILIES, *OTHERS)), 4),
        *rest_pinned(((name, UNEVEN) for name in (*FAMILIES, *OTHERS)), 1),
        *rest_pinned([("olmoe", {"use_rslora": True})], 0),
    ],
)
def test_what_vllm_loads_is_pefts_merge_in_memory_and_comes_back(name, options, tmp_path):
    """Bits stay the same where scales are equal, and products where they are not."""
    model = save_base(name, tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter", **options)
    back, keys = there_and_back(tmp_path, verify=True), tensors_in(tmp_path / "vllm").keys()
    assert any("experts.base_layer.lora_A" in key for key in keys) == (name in THREE_DIMENSIONAL)
    weights, expected = tensors_in(tmp_path / "base"), merge_by_peft(adapted, tmp_path / "by peft")
    assert_served_is(expected, tmp_path / "base", tmp_path / "vllm", name)
    assert any(not torch.equal(weights[key], expected[key]) for key in weights if ".experts." in key)
    if options:
        again = PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "vllm back")
        assert_all_close(merge_by_peft(again, tmp_path / "ours"), expected, 1e-5, ORDER_OF_SUMS)
        return
    there = tensors_in(tmp_path / "adapter")
    assert same_bits(back, there) and same_bits(there_and_back(tmp_path, "sglang"), there)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_what_the_config_of_an_adapter_says_comes_back(name, engine, tmp_path):
    """Engines' files have one rank, padded with zeros, which stand for no rank of the adapter."""
    model = save_base(name, tmp_path / "base")
    options = {"target_modules": ["q_proj", "o_proj"], "experts_r": 2}
    adapted = get_peft_model(model, sonicmoe_hf.lora_config(model, 4, **options))
    save_with_factors(adapted, tmp_path / "adapter")
    assert same_bits(there_and_back(tmp_path, engine), tensors_in(tmp_path / "adapter"))
    before, after = (adapter_config(tmp_path / folder) for folder in ("adapter", f"{engine} back"))
    for entry in ("target_modules", "target_parameters"):  # sets, which PEFT writes in any order
        assert sorted(before.pop(entry)) == sorted(after.pop(entry))
    assert after == {**before, "base_model_name_or_path": str(tmp_path / "base")} and list(after) == list(before)


@pytest.mark.parametrize(
    "family, engine",
    [*((f, "vllm") for f in FAMILIES_IN_VLLM), *rest_pinned((f, "sglang") for f in FAMILIES_IN_SGLANG)],
)
def test_every_family_that_was_read_in_an_engine_is_served_as_pefts_merge(family, engine, tmp_path):
    """Names and products are those of the hub's checkpoint, which the engines' classes follow."""
    model = small_model(family)
    model.save_pretrained(tmp_path / "base")
    adapted = save_with_factors(get_peft_model(model, config_for_vllm(model)), tmp_path / "adapter")
    back = there_and_back(tmp_path, engine)
    assert any(".experts." in name for name in products_of(tmp_path / engine, family))
    assert_served_is(merge_by_peft(adapted, tmp_path / "by peft"), tmp_path / "base", tmp_path / engine, family)
    assert engine == "sglang" or same_bits(back, tensors_in(tmp_path / "adapter"))


def test_an_adapter_of_the_text_model_alone_is_served_under_the_whole_models_names(tmp_path):
    """AutoModelForCausalLM trains Qwen3.5-MoE's text model, whose names lack "language_model"."""
    whole = small_model("qwen3_5_moe")
    whole.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(model).__name__ == "Qwen3_5MoeForCausalLM"
    save_with_factors(get_peft_model(model, sonicmoe_hf.lora_config(model, r=2)), tmp_path / "text")
    save_with_factors(get_peft_model(whole, sonicmoe_hf.lora_config(whole, r=2)), tmp_path / "whole")
    for name in ("text", "whole"):
        convert_adapter(tmp_path / name, tmp_path / f"{name} served", "vllm", trained_on=tmp_path / "base")
    text, of_whole = (tensors_in(tmp_path / f"{name} served") for name in ("text", "whole"))
    assert text.keys() == of_whole.keys() and all(".language_model." in name for name in text)
    trained = tensors_in(tmp_path / "text")
    names = {name.replace("model.language_model.", "model."): name for name in text}
    assert same_bits({short: text[name] for short, name in names.items()}, trained)
    for name in ("text", "whole"):  # which comes back to the class that was trained
        convert_adapter(tmp_path / name, tmp_path / f"{name} again", "hub", trained_on=tmp_path / "base")
        assert same_bits(tensors_in(tmp_path / f"{name} again"), tensors_in(tmp_path / name))
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "text again")
    assert same_bits(get_peft_model_state_dict(again), trained)


@pytest.mark.pinned
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("parameters", [EXPERTS[:1], EXPERTS[1:], []], ids=["gate and up", "down", "attention only"])
def test_an_adapter_on_one_of_the_weights_gets_zeros_for_the_other(name, parameters, tmp_path):
    model = save_base(name, tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter", parameters)
    back = there_and_back(tmp_path)
    of_experts = {key: tensor for key, tensor in tensors_in(tmp_path / "vllm").items() if ".experts." in key}
    zero = {key for key, tensor in of_experts.items() if not tensor.any()}
    if name == "qwen3_moe" and parameters:  # vLLM asserts that all three projections of every expert are there
        without = 2 if parameters == EXPERTS[1:] else 1
        assert len(of_experts) == 2 * 8 * 3 * 2 and len(zero) == len(of_experts) // 3 * without
    assert_served_is(merge_by_peft(adapted, tmp_path / "by peft"), tmp_path / "base", tmp_path / "vllm", name)
    assert same_bits(back, tensors_in(tmp_path / "adapter")), "zeros are left out again"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scales", [(2.0, 2.0), (0.5, 2.0)])
@pytest.mark.parametrize("shares_a", [False, True])
def test_gate_and_up_become_one_weight_with_the_same_products(shares_a, scales, interleaved):
    a = torch.randn(2, 3, 3, 8)
    parts = [Factors(a[0 if shares_a else i], torch.randn(3, 4, 3), scale) for i, scale in enumerate(scales)]
    fused = fuse_gate_and_up(*parts, interleaved)
    product = fused.scale * fused.b @ fused.a
    products = (product[:, 0::2], product[:, 1::2]) if interleaved else product.chunk(2, dim=1)
    for part, found in zip(parts, products):
        torch.testing.assert_close(found, part.scale * part.b @ part.a)
    assert fused.rank == (3 if shares_a and scales[0] == scales[1] else 6)


@pytest.mark.parametrize("scales", [(2.0, 2.0, 2.0), (1.0, 2.0, 0.5)])
def test_experts_of_several_ranks_and_scales_become_one_weight_with_the_same_products(scales):
    own = [Factors(torch.randn(r, 8), torch.randn(4, r), scale) for r, scale in zip((2, 4, 1), scales)]
    of_all = stack_experts(own)
    assert of_all.rank == 4
    for expert, factors in enumerate(own):
        product = of_all.scale * of_all.b[expert] @ of_all.a[expert]
        torch.testing.assert_close(product, factors.scale * factors.b @ factors.a)


def test_an_adapter_as_it_begins_training_comes_back_whole(tmp_path):
    """B is zero then, and A is not: what is trained on must not be left out."""
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["o_proj"], target_parameters=EXPERTS)
    get_peft_model(save_base("qwen3_moe", tmp_path / "base"), config).save_pretrained(tmp_path / "adapter")
    assert same_bits(there_and_back(tmp_path), tensors_in(tmp_path / "adapter"))


def test_a_file_with_factors_of_single_experts_is_opened_once_a_weight(tmp_path):
    """Each opening reads the names of all experts of all layers: for each tensor, Qwen3-30B-A3B's would take hours."""
    model = adapt(save_base("qwen3_moe", tmp_path / "base"), tmp_path / "adapter").unload()
    convert_adapter(tmp_path / "adapter", tmp_path / "served", "vllm")
    with mock.patch.object(adapter, "open_tensors", wraps=adapter.open_tensors) as opened:
        weights = list(adapter.Adapter.read(tmp_path / "served", model).factors.values())
    assert opened.call_count == len(weights) == 2 * 4, "of two layers: experts' two weights, q_proj and o_proj"


@pytest.mark.parametrize("rank", [8, 512])
def test_ranks_that_vllm_has_are_taken_as_they_are(rank, tmp_path, capsys):
    adapt(save_base("qwen3_moe", tmp_path / "base"), tmp_path / "adapter", rank_pattern={"o_proj": rank})
    assert main(["convert", str(tmp_path / "adapter"), str(tmp_path / "served"), "--layout", "vllm"]) == 0
    assert f"--max-lora-rank {rank} " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", rest_pinned(FAMILIES))
def test_an_adapter_trained_on_the_native_layout_is_served_and_comes_back(name, tmp_path):
    hub, native = save_both(build(name), tmp_path)
    adapt(AutoModelForCausalLM.from_pretrained(native), tmp_path / "adapter", NATIVE_EXPERTS)
    convert_adapter(tmp_path / "adapter", tmp_path / "hub adapter", "hub")
    for engine in ("vllm", "sglang"):
        convert_adapter(tmp_path / "adapter", tmp_path / engine, engine)
        convert_adapter(tmp_path / "hub adapter", tmp_path / f"{engine} from hub", engine, trained_on=hub)
        assert same_bits(tensors_in(tmp_path / engine), tensors_in(tmp_path / f"{engine} from hub"))
    convert_adapter(tmp_path / "vllm", tmp_path / "back", "native", trained_on=hub)
    assert same_bits(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "adapter"))


def with_linear_experts(folder):
    """Build modules named as the tensors of the hub's Qwen3-MoE checkpoint, whose experts are linear layers."""
    root = nn.Module()
    weights = tensors_in(folder)
    for name in sorted(weights):
        *path, _ = name.split(".")
        parent = root
        for part in path[:-1]:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        if weights[name].dim() == 2 and path[-1] != "embed_tokens":
            layer = nn.Linear(*reversed(weights[name].shape), bias=False)
            layer.weight.data.copy_(weights[name])
            parent.add_module(path[-1], layer)
    return root


def test_peft_loads_the_file_into_a_model_whose_experts_are_linear_layers(tmp_path):
    model = save_base("qwen3_moe", tmp_path / "base")
    adapted = adapt(model, tmp_path / "adapter", **UNEVEN)
    convert_adapter(tmp_path / "adapter", tmp_path / "served", "vllm")
    config = adapter_config(tmp_path / "served")
    assert sorted(config["target_modules"]) == ["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj"]
    assert config["target_parameters"] is None
    linear = PeftModel.from_pretrained(with_linear_experts(tmp_path / "base"), tmp_path / "served").merge_and_unload()
    expected = merge_by_peft(adapted, tmp_path / "by peft")
    merged = {name: tensor for name, tensor in linear.state_dict().items() if "proj" in name}
    assert_all_close(merged, {name: expected[name] for name in merged}, 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize(
    "target_modules", [["q_proj", "gate_proj", "up_proj", "down_proj"], ["down_proj", "experts.2.up_proj"]], ids=str
)
def test_what_peft_saves_of_linear_experts_is_served_and_becomes_a_fused_adapter(target_modules, tmp_path):
    """Gate and up have A of their own there, so that the fused rank is the sum of theirs; some experts may have none."""
    save_base("qwen3_moe", tmp_path / "base")
    model = get_peft_model(
        with_linear_experts(tmp_path / "base"),
        LoraConfig(r=2, lora_alpha=5, target_modules=target_modules, alpha_pattern={"experts.3.down_proj": 9}),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "adapter")
    weights = tensors_in(tmp_path / "base")
    linear = model.merge_and_unload().state_dict()
    expected = {**weights, **{name: tensor for name, tensor in linear.items() if "proj" in name}}
    convert_adapter(tmp_path / "adapter", tmp_path / "served", "vllm", trained_on=tmp_path / "base")
    assert adapter_config(tmp_path / "served")["r"] == 2
    assert_served_is(expected, tmp_path / "base", tmp_path / "served", "qwen3_moe")
    convert_adapter(tmp_path / "adapter", tmp_path / "fused", "hub", trained_on=tmp_path / "base")
    fused = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "fused")
    assert_all_close(merge_by_peft(fused, tmp_path / "ours"), expected, 1e-5, ORDER_OF_SUMS)


def test_sglang_gets_a_pair_for_each_expert_and_all_layers_that_it_fuses(tmp_path):
    """SGLang's loader looks q_proj, k_proj and v_proj up together, and the scale is alpha / r whatever the config
    says."""
    for name, modules in (("gpt_oss", ["q_proj"]), ("deepseek_v3", ["kv_a_proj_with_mqa"])):
        model = save_base(name, tmp_path / name)
        adapted = adapt(model, tmp_path / f"{name} adapter", target_modules=modules, **UNEVEN)
        served = tmp_path / f"{name} served"
        convert_adapter(tmp_path / f"{name} adapter", served, "sglang")
        factors = tensors_in(served)
        for key in list(factors):
            for group in (
                ("q_proj", "k_proj", "v_proj"),
                ("q_a_proj", "kv_a_proj_with_mqa"),
                ("gate_proj", "up_proj"),
            ):
                if any(f".{member}." in key for member in group):
                    present = next(member for member in group if f".{member}." in key)
                    assert all(key.replace(f".{present}.", f".{other}.") in factors for other in group)
        assert not any("base_layer" in key or key.endswith(".experts.lora_A.weight") for key in factors)
        assert_served_is(merge_by_peft(adapted, tmp_path / f"{name} by peft"), tmp_path / name, served, name)


def test_an_adapter_on_some_layers_names_them_in_full(tmp_path):
    adapt(save_base("deepseek_v3", tmp_path / "base"), tmp_path / "adapter", layers_to_transform=[1])
    convert_adapter(tmp_path / "adapter", tmp_path / "served", "vllm")
    config = adapter_config(tmp_path / "served")
    assert "model.layers.1.self_attn.o_proj" in config["target_modules"] and config["layers_to_transform"] is None
    assert "experts.0.gate_proj" in config["target_modules"], "gate_proj alone is the shared expert's too"
    factors = tensors_in(tmp_path / "served")
    assert not any(".layers.0." in key for key in factors)
