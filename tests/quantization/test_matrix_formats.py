"""Experts in FP8 and NVFP4 as the hub's checkpoints have them: taken as they are, bit for bit, with adapters beside them.

Tolerances: where both sides compute the same sums in fp32 they differ by nothing but their order: 1e-6 of logits, 1e-5 of
gradients, which sum over more.
"""

import itertools
import json
import shutil

import pytest
import torch
from helpers.adapters import adapt, with_lora
from helpers.checkpoints import (
    CUT_OFF,
    DECLARED_FP8,
    edit_config,
    edit_tensors,
    fp8_of,
    make,
    make_deepseek_v4,
    packed_in,
    same_bits,
    tensors_in,
    to_fp8,
)
from helpers.integers import EXPERTS, to_integers
from helpers.marks import crossed, loads_matrices, rest_pinned
from helpers.models import ORDER_OF_SUMS, assert_all_close, batch, gradients_of
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from sonicmoe_hf import (
    CheckpointError,
    PackedWeight,
    UnsupportedExpertsError,
    convert_checkpoint,
    from_pretrained,
    merge_adapter,
    patch_model,
    quantize_experts,
)
from sonicmoe_hf.formats.float_matrices import FP8Matrix

SIZES = {"qwen3_moe": dict(CUT_OFF), "deepseek_v3": dict(CUT_OFF)}
UNGATED = {"nemotron_h": {"hidden_size": 144, "moe_latent_size": 160, "moe_intermediate_size": 192}}
BATCH = batch(2, 8)
pytestmark = loads_matrices


def make_fp8(folder, family, kind="fp32", **declared):
    make(folder, family, **(SIZES | UNGATED)[family])
    return to_fp8(folder, kind, **declared)


@pytest.mark.parametrize("family, kind", crossed(SIZES, ["fp32", "bf16", "ue8m0"], everywhere=2))
def test_an_fp8_checkpoints_experts_are_taken_bit_for_bit(family, kind, tmp_path):
    stored, dense = make_fp8(tmp_path / "fp8", family, kind)
    model = from_pretrained(tmp_path / "fp8", experts_quantization="fp8")
    layer = "model.layers.1.mlp.experts"
    gate_up, down = (packed_in(model)[f"{layer}.{name}"] for name in ("gate_up_proj", "down_proj"))
    scale_dtype = torch.uint8 if kind == "ue8m0" else torch.float32
    for expert in range(gate_up.shape[0]):
        for place, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            weight, half = (down, 0) if place == 2 else (gate_up, place)
            rows = slice(None) if place == 2 else slice(192 * half, 192 * half + 192)
            full_name = f"{layer}.{expert}.{name}.weight"
            codes, scales = weight.codes[expert, rows], weight.scales[expert, half, :, 0]
            assert torch.equal(codes, stored[full_name].view(torch.uint8)) and scales.dtype == scale_dtype
            theirs = stored[f"{full_name}_scale_inv"]
            assert torch.equal(scales, theirs.view(torch.uint8) if kind == "ue8m0" else theirs.float())
            assert torch.equal(weight.dequantize(torch.float32)[expert, rows], dense[full_name])
    linear = [name for name in stored if f"{name}_scale_inv" in stored and ".experts." not in name]
    state = model.state_dict()
    assert linear and all(torch.equal(state[name], dense[name].bfloat16()) for name in linear)
    model.save_pretrained(tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert same_bits(again.state_dict(), state) and torch.equal(again(**BATCH).logits, model(**BATCH).logits)


@pytest.mark.pinned
def test_fp8_experts_multiply_in_fp8_where_that_is_wanted(tmp_path):
    """Every layer's experts are off by 3 to 6% of what expanded weights give, and patching again ends it."""
    make_fp8(tmp_path / "fp8", "qwen3_moe", "ue8m0")
    expanded = from_pretrained(tmp_path / "fp8", experts_quantization="fp8")
    model = from_pretrained(tmp_path / "fp8", experts_quantization="fp8", experts_compute="fp8")
    exact, found = expanded(**BATCH).logits, model(**BATCH).logits
    assert not torch.equal(found, exact) and (found - exact).norm() < 0.1 * exact.norm()
    patch_model(model)
    assert torch.equal(model(**BATCH).logits, exact)
    dense = from_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"\(experts_quantization='fp8'\), not torch\.bfloat16 and"):
        patch_model(dense, experts_compute="fp8")


@pytest.mark.parametrize("family", rest_pinned(SIZES | UNGATED, 2))
def test_logits_and_adapters_gradients_are_those_of_the_dequantized_model(family, tmp_path):
    make_fp8(tmp_path / "fp8", family)
    packed = from_pretrained(tmp_path / "fp8", experts_quantization="fp8", dtype=torch.float32)
    dense = from_pretrained(tmp_path / "dense", dtype=torch.float32)
    eager = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.float32, experts_implementation="eager"
    )
    expected = eager(**BATCH).logits
    for model in (packed, dense):
        assert (model(**BATCH).logits - expected).norm() <= 1e-6 * expected.norm()
    for model in (packed, dense):
        with_lora(model, target_modules=["o_proj"]).train()(**BATCH).loss.backward()
    assert len(gradients_of(packed)) >= 6
    assert_all_close(gradients_of(packed), gradients_of(dense), 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("family, format", crossed(SIZES | UNGATED, ["nf4", "mxfp4", "nvfp4"], everywhere=1))
def test_fp8_experts_become_4_bits_while_they_stream_in_as_the_dequantized_do(family, format, tmp_path, monkeypatch):
    sizes = (SIZES | UNGATED)[family]
    width = "moe_latent_size" if family in UNGATED else "hidden_size"
    monkeypatch.setitem(sizes, width, 192)  # NF4 needs multiples of 64
    make_fp8(tmp_path / "fp8", family)
    dense = quantize_experts(from_pretrained(tmp_path / "dense", dtype=torch.bfloat16), format)
    monkeypatch.setattr(PackedWeight, "dequantize", None)  # one expert is dense at a time
    with monkeypatch.context() as one_thread:  # others would read all weights before they are packed
        one_thread.setattr(core_model_loading, "ThreadPoolExecutor", None)
        model = from_pretrained(tmp_path / "fp8", experts_quantization=format, dtype=torch.bfloat16)
    assert {weight.format for weight in packed_in(model).values()} == {format}
    assert same_bits(model.state_dict(), dense.state_dict())
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert saved["experts"] == format and "hub" not in saved
    assert same_bits(from_pretrained(tmp_path / "saved").state_dict(), model.state_dict())


def test_what_is_wrong_with_fp8_experts_that_become_4_bits_is_named(tmp_path):
    make_fp8(tmp_path / "fp8", "qwen3_moe")
    with pytest.raises(
        UnsupportedExpertsError, match=r"nf4 packs rows of a multiple of 64 values,.* 144 input features"
    ):
        from_pretrained(tmp_path / "fp8", experts_quantization="nf4")
    edit_tensors(tmp_path / "fp8", lambda tensors: tensors[SCALE].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"gate_up_proj, .*up_proj.weight of expert 3: .* NaN or infinite"):
        from_pretrained(tmp_path / "fp8", experts_quantization="nvfp4")


@pytest.mark.parametrize("kind", rest_pinned(["ue8m0", "fp32"]))
def test_conversion_moves_fp8_blocks_into_native_order_and_back(kind, tmp_path, capsys):
    _, dense = make_fp8(tmp_path / "fp8", "qwen3_moe", kind)
    convert_checkpoint(tmp_path / "fp8", tmp_path / "native", quantize="fp8", verify=True)
    c_fc = from_pretrained(tmp_path / "native").model.layers[1].mlp.experts.c_fc
    assert c_fc.format == "fp8" and c_fc.scales.dtype == (torch.uint8 if kind == "ue8m0" else torch.float32)
    values = c_fc.dequantize(torch.float32)
    for expert in range(values.shape[0]):
        for place, name in enumerate(("gate_proj", "up_proj")):
            assert torch.equal(values[expert, place::2], dense[f"model.layers.1.mlp.experts.{expert}.{name}.weight"])
    # once more, from what is packed; and from what from_pretrained saves, whose gates and ups are concatenated
    from_pretrained(tmp_path / "fp8", experts_quantization="fp8").save_pretrained(tmp_path / "saved")
    for source in ("native", "saved"):
        convert_checkpoint(tmp_path / source, tmp_path / f"{source} again", quantize="fp8")
        assert same_bits(tensors_in(tmp_path / f"{source} again"), tensors_in(tmp_path / "native"))
    convert_checkpoint(tmp_path / "native", tmp_path / "hub", "hub")
    converted = tensors_in(tmp_path / "hub")
    experts = [name for name in dense if ".experts." in name]
    assert experts and all(torch.equal(converted[name], dense[name].bfloat16()) for name in experts)


def test_blocks_that_are_cut_off_are_deepseeks_where_transformers_takes_others():
    theirs = Fp8Dequantize(None)._dequantize_one
    for rows, is_cut in ((256, False), (192, True)):
        values, scales, expected = fp8_of(torch.randn(rows, 128), "fp32")
        assert torch.equal(FP8Matrix().dense(values, scales), expected)
        assert torch.equal(theirs(values, scales, torch.float32), expected) != is_cut


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\].*\[128, 128\]"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"strategy": "channel"}}}},
            "compressed-tensors",
        ),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt as 'FP8'"),
    ],
)
def test_other_kinds_of_fp8_are_refused_by_name_with_a_remedy(changes, match, tmp_path):
    make(tmp_path, "qwen3_moe", **SIZES["qwen3_moe"])
    edit_config(tmp_path, quantization_config={**DECLARED_FP8, **changes})
    with pytest.raises(ValueError, match=f"{match}.*bf16"):
        from_pretrained(tmp_path, experts_quantization="fp8")


@pytest.mark.parametrize(
    "changes, match",
    [
        ({}, 'has FP8 experts: to keep its experts packed .*experts_quantization="fp8"'),
        ({"activation_scheme": "static"}, "activation_scheme 'static'.*load the bf16 checkpoint"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 'has NVFP4 experts: .*experts_quantization="nvfp4"'),
    ],
)
def test_without_a_format_the_remedy_is_named_before_a_weight_is_read(changes, match, tmp_path):
    make(tmp_path, "deepseek_v3", **SIZES["deepseek_v3"])
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    edit_config(tmp_path, quantization_config={**DECLARED_FP8, **changes})
    with pytest.raises(ValueError, match=match):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("options", [{}, {"experts_quantization": "nvfp4"}], ids=["dense", "packed"])
def test_fp8_weights_that_no_config_declares_are_an_error(options, tmp_path):
    """The codes taken for weights, as Transformers does, have a relative error of 1.4."""
    make_fp8(tmp_path / "fp8", "qwen3_moe")
    plain = AutoConfig.from_pretrained(tmp_path / "dense")
    shutil.copytree(tmp_path / "fp8", tmp_path / "undeclared")
    edit_config(tmp_path / "undeclared", quantization_config=None)
    words = r"experts\.0\.\w+\.weight in .* is FP8, but .*add quantization_config to config\.json .*leave out config="
    for folder, given in (
        (tmp_path / "fp8", {"config": plain}),
        (tmp_path / "undeclared", {}),
        (tmp_path, {"subfolder": "undeclared"}),
    ):
        with pytest.raises(CheckpointError, match=words):
            from_pretrained(folder, **given, **options)


@pytest.mark.parametrize("format", rest_pinned(["fp8", "nvfp4"]))
def test_a_layers_experts_that_the_checkpoint_has_in_floats_are_packed_like_those_of_a_dense_one(format, tmp_path):
    stored, dense = make_fp8(tmp_path / "fp8", "qwen3_moe", modules_to_not_convert=["model.layers.1.mlp.experts"])
    plain = {name: tensor.bfloat16() for name, tensor in dense.items() if ".layers.1.mlp.experts." in name}
    of_layer = [name for name in stored if ".layers.1.mlp.experts." in name]
    edit_tensors(tmp_path / "fp8", {**dict.fromkeys(of_layer), **plain})
    edit_tensors(tmp_path / "dense", plain)
    model = from_pretrained(tmp_path / "fp8", experts_quantization=format, dtype=torch.bfloat16)
    expected = from_pretrained(tmp_path / "dense", experts_quantization=format, dtype=torch.bfloat16)
    layers = [0, 1] if format != "fp8" else [1]  # FP8 is taken as it is stored
    for layer, name in itertools.product(layers, ("gate_up_proj", "down_proj")):
        ours, theirs = (getattr(each.model.layers[layer].mlp.experts, name) for each in (model, expected))
        assert all(torch.equal(*parts) for parts in zip(ours.packed, theirs.packed) if parts[0] is not None)
    for name, weight in packed_in(from_pretrained(tmp_path / "fp8", experts_quantization="fp8")).items():
        if ".layers.0." in name:
            wanted = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name.rpartition(".")[2]]
            for expert, values in enumerate(weight.dequantize(torch.float32)):
                parts = [dense[f"model.layers.0.mlp.experts.{expert}.{part}.weight"] for part in wanted]
                assert torch.equal(values, torch.cat(parts))
    adapt(model, tmp_path / "adapter")
    notices = merge_adapter(tmp_path / "fp8", tmp_path / "adapter", tmp_path / "merged").notices
    assert any("the adapter was trained on" in notice for notice in notices) == (format != "fp8")


def test_host_memory_holds_layers_that_have_more_scales_than_the_first(tmp_path):
    """The checkpoint has them for groups of 128, and a layer in floats gets them for groups of 32."""
    make(tmp_path / "packed", "qwen3_moe", hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2)
    to_integers(tmp_path / "packed", "gptq", rf"layers\.0\..*{EXPERTS}")
    resident, streamed = (
        from_pretrained(tmp_path / "packed", experts_quantization="int4", experts_memory=given) for given in (None, 0)
    )
    assert len({weight.packed.scales.numel() for name, weight in packed_in(resident).items() if "down" in name}) == 2
    assert same_bits(streamed.state_dict(), resident.state_dict())
    assert torch.equal(streamed(**BATCH).logits, resident(**BATCH).logits)


@pytest.mark.parametrize("family", SIZES)
def test_a_model_on_the_meta_device_has_its_packed_weights_there(family, tmp_path):
    make_fp8(tmp_path / "fp8", family)
    model = from_pretrained(tmp_path / "fp8", experts_quantization="fp8", device_map="meta")
    assert packed_in(model) and {parameter.device.type for parameter in model.parameters()} == {"meta"}


LAYER = "model.layers.1.mlp.experts.3.up_proj.weight"
SCALE = f"{LAYER}_scale_inv"
LINEAR = "model.layers.1.self_attn.o_proj.weight"


def without(part):
    """Make a function that removes the tensors that have this in their names."""
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


@pytest.mark.pinned
@pytest.mark.parametrize(
    "change, match",
    [
        ({SCALE: None}, "scales of .*up_proj.weight are missing"),
        (lambda t: t[SCALE].fill_(float("nan")), "up_proj_scale_inv has NaN or infinite .* in expert 3"),
        ({SCALE: torch.ones(2, 3)}, r"up_proj.weight of expert 3: weight_scale_inv is .* \(2, 3\)"),
        (lambda t: t[LAYER].view(torch.uint8)[3:4, :5].fill_(255), "gate_up_proj_values has NaN .* in expert 3"),
        (
            without(".layers.1.mlp.experts.3."),
            r"layers\.1\.mlp\.experts\.\w+: .*of 8 experts the checkpoint has 7 .weight, 7 .weight_scale_inv",
        ),
        (without(".layers.1.mlp.experts."), r"the checkpoint has no model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        # 127 as a number of fp32, if dtypes were mixed, where it stands for 1
        (
            {SCALE: torch.ones(2, 2).to(torch.float8_e8m0fnu)},
            "up_proj.weight of expert 3: its weight and scales are stored as .*uint8.*others of this layer as",
        ),
        (
            lambda t: t.update({LAYER: t[LAYER][:-16].clone()}),
            r"up_proj.weight of expert 3: .* stored as .*176, 144",
        ),
        ({f"{LINEAR}_scale_inv": None}, "o_proj.weight is torch.float8_e4m3fn with 0 of 1 scales"),
        (lambda t: t[f"{LINEAR}_scale_inv"].fill_(float("inf")), "o_proj.weight or its scales have NaN"),
    ],
)
def test_a_scale_that_is_missing_or_no_number_or_of_another_shape_is_found_while_loading(change, match, tmp_path):
    make_fp8(tmp_path / "fp8", "qwen3_moe")
    edit_tensors(tmp_path / "fp8", change)
    with pytest.raises(CheckpointError, match=match):
        from_pretrained(tmp_path / "fp8", experts_quantization="fp8")


@pytest.fixture
def deepseek_v4(tmp_path):
    return make_deepseek_v4(tmp_path)


def test_the_fp4_experts_of_deepseek_v4_are_mxfp4_bit_for_bit(deepseek_v4, tmp_path):
    folder, plain = deepseek_v4
    with pytest.raises(ValueError, match=r"'fp8', but the checkpoint is quantized already \(mxfp4\)"):
        from_pretrained(folder, experts_quantization="fp8")
    with pytest.raises(ValueError, match=r'MXFP4 experts: .*from_pretrained\(\.\.\., experts_quantization="mxfp4"\)'):
        from_pretrained(folder)
    packed = from_pretrained(folder, experts_quantization="mxfp4", dtype=torch.float32)
    dense = from_pretrained(plain, dtype=torch.float32)
    weights = packed_in(packed)
    assert len(weights) == 4 and {weight.format for weight in weights.values()} == {"mxfp4"}
    expected = dense.state_dict()
    assert all(torch.equal(weight.dequantize(torch.float32), expected[name]) for name, weight in weights.items())
    assert all(torch.equal(p, expected[name]) for name, p in packed.named_parameters() if name not in weights)
    logits = dense(**BATCH).logits
    assert (packed(**BATCH).logits - logits).norm() <= 1e-6 * logits.norm()
