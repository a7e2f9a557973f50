"""convert --layout vllm and sglang raise errors with the remedy for what engines do not take; the
command says how to serve."""

import pytest
import torch
from helpers.adapters import EXPERTS, adapt
from helpers.checkpoints import edit_config, edit_tensors, rewrite, tensors_in
from helpers.engine_adapters import assert_refused, edit_adapter_config, save_base
from helpers.small_families import small_model

from sonicmoe_hf import convert_adapter, lora_config
from sonicmoe_hf.lora.names import is_target_parameter
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.pinned


@pytest.fixture
def adapter(tmp_path):
    adapt(save_base("qwen3_moe", tmp_path / "base"), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_routers_embeddings_biases_and_large_ranks_raise_with_the_remedy(tmp_path):
    model = save_base("gpt_oss", tmp_path / "gpt_oss")
    adapt(model, tmp_path / "biases", [*EXPERTS, "mlp.experts.down_proj_bias"])
    assert_refused(tmp_path / "biases", "experts.down_proj_bias, and engines take .* sonicmoe-hf merge")
    merged = "which not all models of engines adapt; merge it, and serve the result"
    for match, parameters, modules in (
        (f"a router, {merged}", [*EXPERTS, "mlp.gate.weight"], ["q_proj"]),
        ("lora_embedding_A is neither lora_A nor lora_B .*merge_and_unload", EXPERTS, ["q_proj", "embed_tokens"]),
        (f"the embeddings or the head, {merged}", EXPERTS, ["lm_head"]),
    ):
        folder = tmp_path / f"{modules[-1]} {len(modules)}"
        adapt(save_base("qwen3_moe", tmp_path / "base"), folder, parameters, target_modules=modules)
        assert_refused(folder, match)
    edit_adapter_config(folder, modules_to_save=["lm_head"])
    for engine in ("vllm", "sglang"):
        match = r"modules_to_save is \['lm_head'\].*sonicmoe-hf merge BASE ADAPTER DST"
        assert_refused(folder, match, engine)
    adapt(save_base("qwen3_moe", tmp_path / "base"), tmp_path / "large", rank_pattern={"q_proj": 513})
    assert_refused(tmp_path / "large", "largest rank is 513, and vLLM's is 512; merge it")


def test_vllm_decodes_without_adapters_of_what_latent_attention_absorbs(tmp_path):
    """VLLM's MLA makes W_UK and W_UV of the base's kv_b_proj as it loads, and no adapter reaches them; SGLang
    corrects."""
    modules = ["kv_b_proj", "o_proj"]
    adapt(save_base("deepseek_v3", tmp_path / "base"), tmp_path / "adapter", target_modules=modules)
    match = (
        "adapts kv_b_proj, and vLLM decodes without .* sonicmoe-hf merge BASE ADAPTER DST.*; or leave kv_b_proj out"
    )
    assert_refused(tmp_path / "adapter", match)
    convert_adapter(tmp_path / "adapter", tmp_path / "served", "sglang")
    assert any(".kv_b_proj." in name for name in tensors_in(tmp_path / "served"))


def test_vllm_gives_weights_of_deepseek_v4_to_kernels_that_leave_their_adapters_out(tmp_path):
    """vLLM's own code read what `config_for_vllm` adapts (tests/adapters/read_by_vllm.py): the other layers."""
    for target in ("self_attn.o_a_proj", "compressor.kv_proj", "compressor.indexer.gate_proj"):
        model, folder = small_model("deepseek_v4"), tmp_path / target
        model.save_pretrained(folder / "base")
        adapt(model, folder / "adapter", lora_config(model).target_parameters, target_modules=[target])
        layer = target.removeprefix("self_attn.")
        match = (
            rf"adapts {layer}, and vLLM decodes without .*; or leave {layer} out of target_modules .*\(exclude_modules"
        )
        assert_refused(folder / "adapter", match, trained_on=folder / "base")


def test_files_that_are_no_such_adapter_raise_with_the_name(adapter, tmp_path):
    convert_adapter(adapter, tmp_path / "served", "vllm")
    weights = tensors_in(tmp_path / "served")

    def factors(module, a, b=None):
        stem = f"base_model.model.model.layers.0.mlp.experts.{module}"
        return {f"{stem}.lora_A.weight": a} | ({} if b is None else {f"{stem}.lora_B.weight": b})

    a, b = torch.ones(2, 32), torch.ones(16, 2)
    for changes, match in (
        (factors("3.up_proj", torch.ones(3, 32)), r"\(3, 32\) and \(16, 2\), where \(2, 32\)"),
        (factors("3.up_proj", torch.ones(2, 31)), r"\(2, 31\) and \(16, 2\), where \(2, 32\)"),
        (factors("8.up_proj", a, b), "8.up_proj.lora_A.weight adapts nothing that the model has"),
        (factors("3.w9", a, b), "3.w9.lora_A.weight adapts nothing that the model has"),
        (factors("base_layer", torch.ones(16, 32)), "mixes two forms"),
    ):
        edit_tensors(tmp_path / "served", changes)
        for layout in ("vllm", "hub", "native"):
            assert_refused(tmp_path / "served", match, layout, trained_on=tmp_path / "base")
        rewrite(tmp_path / "served", weights)
    edit_adapter_config(tmp_path / "served", r=4)
    expected = r"where \(4, 16\) and \(32, 4\) are expected for r = 4"
    assert_refused(tmp_path / "served", expected, trained_on=tmp_path / "base")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_adapter_of_the_vision_tower_is_refused(engine, tmp_path):
    """vLLM would leave it out in silence, unless it is told otherwise."""
    model = small_model("qwen3_5_moe")
    model.save_pretrained(tmp_path / "base")
    adapt(model, tmp_path / "adapter", target_modules=["q_proj", "linear_fc1"])
    match = r"model.visual.*linear_fc1.weight is outside the language model, .*; merge it"
    assert_refused(tmp_path / "adapter", match, engine, trained_on=tmp_path / "base")


def test_a_model_that_engines_are_not_known_to_adapt_is_refused(adapter, tmp_path):
    model = small_model("granitemoehybrid")  # vLLM expects names of its experts that no file can have
    model.save_pretrained(tmp_path / "hybrid" / "base")
    adapt(model, tmp_path / "hybrid" / "adapter", lora_config(model).target_parameters)
    match = "not known to take adapters of GraniteMoeHybridForCausalLM"
    assert_refused(tmp_path / "hybrid" / "adapter", match, trained_on=tmp_path / "hybrid" / "base")
    changes = {"model_type": "flex_olmo", "intermediate_size": 16, "architectures": ["FlexOlmoForCausalLM"]}
    edit_config(adapter.parent / "base", **changes)
    for engine, title in (("vllm", "vLLM 0.33"), ("sglang", "SGLang 0.5.23")):
        match = rf"{title} is not known to take adapters of FlexOlmoForCausalLM .*docs/models.md.*merge"
        assert_refused(adapter, match, engine)


@pytest.mark.parametrize(
    "target, is_named",
    [
        ("experts.up_proj", True),
        ("up_proj", True),
        ("xperts.up_proj", False),
        ("p_proj", False),
        ("gate_up_proj", False),
    ],
)
def test_a_target_names_whole_words_of_a_parameters_name(target, is_named):
    """A part of a word is no match, as in PEFT."""
    assert is_target_parameter("backbone.layers.1.mixer.experts.up_proj", {"target_parameters": [target]}) == is_named
    assert not is_target_parameter("model.layers.1.mlp.experts.gate_up_proj", {"target_parameters": ["up_proj"]})


def test_the_command_says_how_to_serve_the_adapter(adapter, tmp_path, capsys):
    arguments = ["convert", str(adapter), str(tmp_path / "served"), "--layout", "vllm"]
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "vllm serve BASE --enable-lora --max-lora-rank 8 --lora-modules NAME=ADAPTER" in printed
    assert '"model": "NAME"' in printed and "--enable-expert-parallel" in printed
    edit_adapter_config(adapter, target_parameters=None)
    edit_tensors(adapter, dict.fromkeys(name for name in tensors_in(adapter) if ".experts." in name))
    assert main(["convert", str(adapter), str(tmp_path / "attention"), "--layout", "vllm"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "no factors of experts, rank 2: vllm serve" in printed and "--enable-expert-parallel" not in printed
    assert main(["convert", str(adapter), str(tmp_path / "sglang"), "--layout", "sglang"]) == 0
    assert '"lora_path": "NAME"' in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "base"), str(tmp_path / "model"), "--layout", "vllm"]) == 2
    assert "base is no folder with adapter_config.json" in capsys.readouterr().err


def test_converting_for_vllm_says_that_experts_need_a_gpu(adapter, tmp_path, capsys):
    for layout, count in (("vllm", 1), ("sglang", 0)):
        assert main(["convert", str(adapter), str(tmp_path / layout), "--layout", layout]) == 0
        assert capsys.readouterr().out.count("note: vLLM adapts experts on GPUs alone\n") == count
