"""Messages of loading, patching, layers and attention: each is raised, and then what it names is done."""

import contextlib
import inspect
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.adapters import lora
from helpers.checkpoints import config_in, edit_config, load_whole, make, packed_in, to_fp8, to_nvfp4
from helpers.integers import DECLARED, to_integers
from helpers.marks import loads_matrices
from helpers.models import OF_64, batch, build, build_patched, logits_of, relative_error
from helpers.said import says, silent
from helpers.small_families import small_model
from peft import get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
)
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.longcat_flash.configuration_longcat_flash import LongcatFlashConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

import sonicmoe_hf
from sonicmoe_hf import PackedWeight, convert_checkpoint, from_pretrained, quantize_experts
from sonicmoe_hf.checkpoints.reading.config_only import build_on_meta
from sonicmoe_hf.layer.moe_experts import LowRank, moe_experts
from sonicmoe_hf.patching import loading_packed
from sonicmoe_hf.patching.forwards import why_not_reached

pytestmark = pytest.mark.pinned
ONE = {"num_hidden_layers": 1}
EXACT = 1e-6  # fp32: sums in another order


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "hub"
    make(folder, "qwen3_moe", dtype=torch.float32, **ONE, **OF_64["qwen3_moe"])
    return folder


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8") / "hub"
    make(folder, "qwen3_moe", **ONE, hidden_size=128, moe_intermediate_size=128)
    to_fp8(folder)
    return folder


def same(ours, theirs):
    assert relative_error(logits_of(ours), logits_of(theirs)) < EXACT
    return True


# loading


def test_what_from_pretrained_is_given(hub):
    with says("contradicts sonicmoe_hf.from_pretrained; leave it out, or load with AutoModelForCausalLM"):
        from_pretrained(hub, experts_implementation="eager")
    with says("which torch does not know; give 'bfloat16'"):
        from_pretrained(hub, dtype="bf16")
    assert from_pretrained(hub, dtype="bfloat16").dtype == torch.bfloat16
    with says("load_in_4bit=True is no argument of Transformers 5", "experts_quantization='nf4' packs the experts"):
        from_pretrained(hub, load_in_4bit=True)
    with pytest.raises(TypeError, match=r"no argument expert_quantization; did you mean experts_quantization\?"):
        from_pretrained(hub, expert_quantization="nf4")
    linear = BitsAndBytesConfig(load_in_4bit=True)
    model = from_pretrained(hub, experts_quantization="nf4", quantization_config=linear)
    assert packed_in(model) and type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    with says("there is no folder org/model-of-nobody", "unset HF_HUB_OFFLINE, or give a local folder"):
        from_pretrained("org/model-of-nobody")
    assert same(from_pretrained(hub), load_whole(hub))


def test_experts_that_bitsandbytes_leaves_are_packed(hub):
    words, linear = "pack them, by sonicmoe_hf.from_pretrained", BitsAndBytesConfig(load_in_4bit=True)
    with says(words):
        from_pretrained(hub, quantization_config=linear)
    with silent(words):
        assert packed_in(from_pretrained(hub, quantization_config=linear, experts_quantization="nf4"))


def test_experts_are_packed_while_a_model_loads_or_before_it_is_patched(hub, fp8):
    with says("quantize its experts while it is loaded: sonicmoe_hf.from_pretrained(..., experts_quantization="):
        quantize_experts(from_pretrained(hub, quantization_config=BitsAndBytesConfig(load_in_4bit=True)), "nf4")
    with says("is on the meta device; load the model's weights first"):
        quantize_experts(build_on_meta(str(hub)), "nf4")
    model = load_whole(hub)
    quantize_experts(model, "nf4")
    assert same(sonicmoe_hf.patch_model(model) and model, from_pretrained(hub, experts_quantization="nf4"))
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with says("leave out experts_quantization"):
        quantize_experts(dense, "nf4")
    with says('use one device (device_map={"": 0}) or GPUs alone'):
        from_pretrained(hub, experts_quantization="nf4", device_map={"model": "cpu", "lm_head": "disk"})
    assert same(from_pretrained(hub, experts_quantization="nf4", device_map={"": "cpu"}), model)


@loads_matrices
def test_formats_of_a_checkpoint_that_is_quantized(fp8, tmp_path):
    packed = from_pretrained(fp8, experts_quantization="fp8", dtype=torch.bfloat16)
    with says(
        'with sonicmoe_hf.from_pretrained(..., experts_quantization="fp8")', "FineGrainedFP8Config(dequantize=True)"
    ):
        from_pretrained(fp8)
    dense = from_pretrained(fp8, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16)
    assert packed_in(packed) and not packed_in(dense)
    assert relative_error(logits_of(packed).float(), logits_of(dense).float()) < 0.02, "bf16"


@loads_matrices
def test_before_transformers_5_19_fp8_is_converted_first(fp8, tmp_path, monkeypatch):
    monkeypatch.setattr(loading_packed, "LOADS_MATRICES", False)
    with says("or convert the checkpoint first: sonicmoe-hf convert SRC DST --layout native --quantize fp8"):
        from_pretrained(fp8, experts_quantization="fp8")
    convert_checkpoint(fp8, tmp_path / "native", layout="native", quantize="fp8")
    native = from_pretrained(tmp_path / "native", dtype=torch.float32)
    assert packed_in(native)
    assert relative_error(logits_of(native), logits_of(load_whole(fp8.with_name("dense")))) < 0.01, "rounded to bf16"


@loads_matrices
def test_mxfp4_nvfp4_and_integers_load_as_the_message_says(tmp_path):
    make(tmp_path / "gpt-oss", "gpt_oss", "mxfp4", **ONE)
    kept = build("gpt_oss", **ONE)
    with torch.device("meta"):  # what Transformers loads where it has kernels for MXFP4
        kept.model.layers[0].mlp.experts = Mxfp4GptOssExperts(kept.config)
    with says(
        "its experts are quantized (Mxfp4GptOssExperts) and never reach sonicmoe_hf",
        'experts_quantization="mxfp4"); for plain weights, with quantization_config=Mxfp4Config(dequantize=True)',
    ):
        sonicmoe_hf.patch_model(kept)
    linear = BitsAndBytesConfig(load_in_4bit=True)
    for options, words in (
        ({"experts_quantization": "fp8"}, "name that format, or load the bf16 checkpoint that it was made from"),
        (
            {"experts_quantization": "mxfp4", "quantization_config": linear},
            "leave it out, or load the bf16 checkpoint",
        ),
    ):
        with says("but the checkpoint is quantized already (mxfp4)", words):
            from_pretrained(tmp_path / "gpt-oss", **options)
    dense = from_pretrained(
        tmp_path / "gpt-oss", quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    packed = from_pretrained(tmp_path / "gpt-oss", experts_quantization="mxfp4", dtype=torch.float32)
    assert packed_in(packed) and relative_error(logits_of(packed), logits_of(dense)) < EXACT
    for name, store, words, format in (
        ("nvfp4", to_nvfp4, 'experts_quantization="nvfp4")', "nvfp4"),
        ("int4", lambda folder: to_integers(folder, "ct-32"), 'experts_quantization="int4")', "int4"),
    ):
        folder = tmp_path / name
        make(folder, "qwen3_moe", **ONE, **OF_64["qwen3_moe"])
        store(folder)
        with says(words):
            from_pretrained(folder)
        model = from_pretrained(folder, experts_quantization=format, dtype=torch.float32)
        assert {weight.format for weight in packed_in(model).values()} == {format}
        assert logits_of(model).isfinite().all()


@loads_matrices
def test_what_config_json_says_of_a_quantization(hub, fp8, tmp_path):
    shutil.copytree(fp8, tmp_path / "undeclared")
    declared = config_in(fp8)["quantization_config"]
    edit_config(tmp_path / "undeclared", quantization_config=None)
    with says("add quantization_config to config.json as the original has it", "leave out config="):
        from_pretrained(tmp_path / "undeclared")
    with says("config.json declares no fp8 quantization; add quantization_config as the original has it"):
        convert_checkpoint(tmp_path / "undeclared", tmp_path / "native", layout="native")
    edit_config(tmp_path / "undeclared", quantization_config=declared)
    assert same(
        *(
            from_pretrained(folder, experts_quantization="fp8", dtype=torch.float32)
            for folder in (tmp_path / "undeclared", fp8)
        )
    )
    convert_checkpoint(tmp_path / "undeclared", tmp_path / "native", layout="native")
    shutil.copytree(hub, tmp_path / "declared")
    edit_config(tmp_path / "declared", quantization_config=DECLARED["gptq"])
    with says("remove quantization_config from config.json"):
        from_pretrained(tmp_path / "declared", experts_quantization="int4")
    edit_config(tmp_path / "declared", quantization_config=None)
    assert same(from_pretrained(tmp_path / "declared"), load_whole(hub))


# patching


def test_what_is_patched():
    model = build("qwen3_moe", **ONE)
    for given, words in (
        (nn.Linear(2, 2), "holds no Transformers model; pass the PreTrainedModel or its wrapper"),
        (SimpleNamespace(callback_handler=0), "give its model, trainer.model"),
        ("org/name", "this takes a model and got a str: load it first"),
        (
            nn.ModuleDict({"a": model, "b": build("olmoe", **ONE)}),
            "a (Qwen3MoeForCausalLM)",
        ),
    ):
        with says(words):
            sonicmoe_hf.patch_model(given)
    pair = nn.ModuleDict({"a": model, "b": build("olmoe", **ONE)})
    with says("models with experts: a (Qwen3MoeForCausalLM) and b (OlmoeForCausalLM); pass one of them"):
        sonicmoe_hf.patch_model(pair)
    sonicmoe_hf.patch_model(pair["b"])
    assert sonicmoe_hf.is_patched(pair["b"]) and not sonicmoe_hf.is_patched(model)
    with says("is not patched; call sonicmoe_hf.patch_model(model) first"):
        sonicmoe_hf.set_routing(model, "top_k")
    sonicmoe_hf.patch_model(nn.ModuleDict({"wrapper": model}))
    sonicmoe_hf.set_routing(model, "top_k")
    assert sonicmoe_hf.is_patched(model)


def test_another_implementation_is_undone():
    model = build_patched("qwen3_moe", sonicmoe_hf.TokenRounding(tile=4), **ONE)
    expected = logits_of(model)
    model.set_experts_implementation("eager")
    model.train()
    with says("set the routing policy to None (top-k) or undo the other setting"):
        model(**batch())
    sonicmoe_hf.set_routing(model, None)
    assert model(**batch()).loss.isfinite()
    model.set_experts_implementation("sonicmoe_hf")
    assert torch.equal(logits_of(model), expected)


def test_what_a_model_ignores_comes_from_the_class_that_takes_it():
    from sonicmoe_hf.patching import guard

    model = build_patched("qwen3_moe", **ONE)
    inputs, pixels = batch(), {"pixel_values": torch.zeros(1, 3)}
    with says("load the class that the checkpoint's `architectures` names"), contextlib.suppress(TypeError):
        model(**inputs, **pixels)
    whole = build_patched("qwen3_vl_moe")
    with silent(guard.IGNORED[:12]):
        assert "pixel_values" in inspect.signature(type(whole).forward).parameters
        assert whole(**inputs).loss.isfinite()


def test_experts_that_others_replaced_or_changed(hub, tmp_path, monkeypatch):
    changed = load_whole(hub)
    changed.model.layers[0].mlp.experts.act_fn = nn.Tanh()
    with says('load the model with experts_implementation="grouped_mm"'):
        sonicmoe_hf.patch_model(changed)
    by_mm = AutoModelForCausalLM.from_pretrained(hub, experts_implementation="grouped_mm", dtype=torch.float32)
    assert same(by_mm, load_whole(hub))
    make(tmp_path / "gpt-oss", "gpt_oss", dtype=torch.float32, **ONE)
    monkeypatch.setattr(GptOssMLP, "kernel_layer_name", "MegaBlocksMoeMLP", raising=False)  # as `kernels` does
    model = load_whole(tmp_path / "gpt-oss")
    model._use_kernels = True
    with says("load the model with use_kernels=False"):
        sonicmoe_hf.patch_model(model)
    assert same(from_pretrained(tmp_path / "gpt-oss", use_kernels=False), load_whole(tmp_path / "gpt-oss"))


# layers


def layer_inputs(**changes):
    inputs = {
        "x": torch.randn(5, 64),
        "gate_up": torch.randn(4, 128, 64),
        "down": torch.randn(4, 64, 64),
        "routing": (torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)),
        **changes,
    }
    return [inputs.pop(name) for name in ("x", "gate_up", "down", "routing")], inputs


def out(**changes):
    given, options = layer_inputs(**changes)
    return moe_experts(*given, **options)


def test_what_a_layer_is_given(monkeypatch):
    with says("layout is 'packed'; choose one of 'concatenated', 'interleaved'"):
        out(layout="packed")
    assert out(layout="interleaved").shape == (5, 64)
    with says(
        "gate_up has dtype torch.float64 but x has torch.float32; cast one of them, or run under torch.autocast"
    ):
        out(gate_up=torch.randn(4, 128, 64).double())
    assert out(gate_up=torch.randn(4, 128, 64).double().float()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert out(gate_up=torch.randn(4, 128, 64).double()).shape == (5, 64)
    with says("gate_up is on meta but x is on cpu; move them to one device"):
        out(gate_up=torch.empty(4, 128, 64, device="meta"))
    assert out(gate_up=torch.randn(4, 128, 64).to("cpu")).device.type == "cpu"
    with says("use layout='concatenated' or 'transposed_concatenated'"):
        out(gate_up=torch.randn(4, 64, 64), layout="interleaved", activation="relu2")
    for layout in ("concatenated", "transposed_concatenated"):
        assert out(gate_up=torch.randn(4, 64, 64), layout=layout, activation="relu2").shape == (5, 64)
    with says("asks for 'hopper'", "leave the choice to sonicmoe_hf, or use 'eager'"):
        out(backend="hopper")
    assert out(backend="eager").shape == out().shape
    both = {"gate_up": torch.randn(4, 64, 128), "down": torch.randn(4, 64, 64), "layout": "transposed_concatenated"}
    with says("which `layout` contradicts; quantize it in the layout that it is used in"):
        out(**{**both, "down": PackedWeight.quantize(both["down"], "nf4")})
    packed = PackedWeight.quantize(both["down"], "nf4", is_transposed=True)
    assert out(**{**both, "down": packed}).shape == (5, 64)
    with says("compute='fp8' takes", "leave compute out"):
        out(compute="fp8")


def test_gradients_are_taken_one_at_a_time():
    (x, gate_up, down, routing), _ = layer_inputs()

    def loss(x):
        return moe_experts(x, gate_up, down, routing).sum()

    with says("use backward() or torch.autograd.grad, one gradient at a time"):
        torch.func.grad(loss)(x)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x), x)
    loss(x).backward()
    assert torch.equal(x.grad, gradient) and gradient.any()


def test_packed_experts_are_trained_and_read_as_the_messages_say(hub):
    model = from_pretrained(hub, experts_quantization="nf4")
    weight = model.model.layers[0].mlp.experts.down_proj
    with says("are frozen and have no gradient; train adapters on them (peft.LoraConfig(target_parameters="):
        weight.requires_grad_(True)
    adapted = get_peft_model(model, lora(model))
    adapted(**batch()).loss.backward()
    assert any(p.grad is not None for name, p in adapted.named_parameters() if "experts" in name and "lora" in name)
    with says(
        "compute with sonicmoe_hf (patch_model, SonicMoEExperts), shard with FSDP2 (fully_shard), or take weight"
    ):
        weight @ torch.randn(64, 64)
    assert (weight.dequantize() @ torch.randn(64, 64)).isfinite().all()


# attention


def test_what_attention_with_sinks_is_given(tmp_path):
    make(tmp_path / "gpt-oss", "gpt_oss", dtype=torch.float32, **ONE)

    def load(**options):
        return from_pretrained(tmp_path / "gpt-oss", **options)

    sinks, eager = load(attn_implementation="torch_sinks"), load(attn_implementation="eager")
    inputs = batch()
    with says("no output_attentions=True, since it computes no probabilities", "; or load the model with"):
        sinks(**inputs, output_attentions=True)
    assert eager(**inputs, output_attentions=True).attentions[0].shape == (4, 4, 24, 24)
    with says("load the model with attention_dropout=0.0"):
        load(attn_implementation="torch_sinks", attention_dropout=0.1).train()(**inputs)
    again = load(attn_implementation="torch_sinks", attention_dropout=0.0)
    assert same(again, eager)
    assert again.train()(**inputs).loss.isfinite()


def test_experts_that_are_out_of_reach_are_trained_without_sonicmoe_hf():
    config = LongcatFlashConfig(hidden_size=16, expert_ffn_hidden_size=16, n_routed_experts=4, zero_expert_num=2)
    experts = LongcatFlashExperts(config)
    with says("so sonicmoe_hf cannot compute these experts; train this model without sonicmoe_hf"):
        print(why_not_reached(experts))
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    experts(torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)).sum().backward()
    assert all(parameter.grad.any() for parameter in experts.parameters())


def test_a_model_of_chosen_keys_loads_with_attention_in_pieces(tmp_path):
    pytest.importorskip("transformers.models.hy_v4")
    small_model("hy_v4").save_pretrained(tmp_path)
    with says(
        "does not compute hy_v4: its keys are chosen for each query", 'load it with attn_implementation="torch_pieces"'
    ):
        from_pretrained(tmp_path, attn_implementation="torch_sinks")(**batch())
    pieces = from_pretrained(tmp_path, attn_implementation="torch_pieces")
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert relative_error(logits_of(pieces), logits_of(eager)) < 1e-4


def test_factors_are_where_their_weight_is():
    inputs = torch.randn(5, 64), torch.randn(4, 128, 64), torch.randn(4, 64, 64)
    routing = torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)
    a, b = torch.randn(4, 2, 64), torch.randn(4, 128, 2)
    with says("is on meta but its weight is on cpu; move them to one device"):
        moe_experts(*inputs, routing, gate_up_adapter=LowRank(a.to("meta"), b, 1.0))
    assert moe_experts(*inputs, routing, gate_up_adapter=LowRank(a, b, 1.0)).isfinite().all()
