"""NVFP4 checkpoints in ModelOpt's layout: their values in bf16, and experts packed anew for training adapters."""

import json

import pytest
import torch
from helpers.checkpoints import (
    DECLARED_NVFP4,
    assert_conversion_refused,
    config_in,
    edit_config,
    edit_tensors,
    make,
    rewrite,
    same_bits,
    tensors_in,
    to_nvfp4,
)
from helpers.marks import loads_matrices

from sonicmoe_hf import CheckpointError, convert_checkpoint, from_pretrained
from sonicmoe_hf.checkpoints.writing.model_card import CARD

SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "nvfp4"
    make(folder, "qwen3_moe", **SIZES)
    return folder, *to_nvfp4(folder)


@pytest.fixture(params=["config.json", "hf_quant_config.json"])
def declared(checkpoint, request):
    """Declare the checkpoint in config.json, or beside it as older exports do."""
    if request.param != "config.json":
        edit_config(checkpoint[0], quantization_config=None)
        quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        (checkpoint[0] / request.param).write_text(json.dumps({"quantization": quantization}))
    return checkpoint


def test_it_becomes_bf16_with_modelopts_values(declared, tmp_path):
    folder, _, values = declared
    done = convert_checkpoint(folder, tmp_path / "hub", "hub", verify=True)
    assert done.notices[0] == "the weights were nvfp4 and are bfloat16 now"
    converted = tensors_in(tmp_path / "hub")
    assert converted.keys() == values.keys()
    assert [name for name in values if not torch.equal(converted[name], values[name])] == []
    assert "quantization_config" not in config_in(tmp_path / "hub")
    assert not (tmp_path / "hub" / "hf_quant_config.json").exists()


def test_it_is_kept_as_it_is_and_its_card_names_the_format(declared, tmp_path):
    folder, stored, _ = declared
    convert_checkpoint(folder, tmp_path / "kept", "hub", quantize="nvfp4")
    assert same_bits(tensors_in(tmp_path / "kept"), stored)
    assert "layout, experts in nvfp4\n" in (tmp_path / "kept" / CARD).read_text()


@loads_matrices
def test_its_experts_are_taken_bit_for_bit(declared, tmp_path):
    folder, stored, values = declared
    model = from_pretrained(folder, experts_quantization="nvfp4")
    experts = model.model.layers[1].mlp.experts
    for name, weight, rows, half in (
        ("gate_proj", experts.gate_up_proj, slice(64), 0),
        ("up_proj", experts.gate_up_proj, slice(64, 128), 1),
        ("down_proj", experts.down_proj, slice(64), 0),
    ):
        theirs = f"model.layers.1.mlp.experts.2.{name}.weight"
        assert weight.format == "nvfp4" and torch.equal(weight.codes[2, rows], stored[theirs])
        assert torch.equal(weight.scales[2, rows], stored[f"{theirs}_scale"].view(torch.uint8))
        assert torch.equal(weight.state[2].flatten()[half], stored[f"{theirs}_scale_2"])
        assert torch.equal(weight.dequantize(torch.bfloat16)[2, rows], values[theirs])
    linear = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(model.state_dict()[linear], values[linear])
    model.save_pretrained(tmp_path / "saved")
    assert same_bits(from_pretrained(tmp_path / "saved").state_dict(), model.state_dict())
    # into our layout, each projection's scales as they are; and from there to dense
    convert_checkpoint(folder, tmp_path / "native", quantize="nvfp4", verify=True)
    convert_checkpoint(tmp_path / "native", tmp_path / "hub", "hub")
    assert same_bits(tensors_in(tmp_path / "hub"), values)


@loads_matrices
@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t.pop(f"{EXPERT}_scale_2"), "scales of .*up_proj.weight are missing"),
        (lambda t: t[f"{EXPERT}_scale_2"].fill_(float("nan")), "gate_up_proj_scale_2 has NaN or infinite"),
        (
            lambda t: t[f"{EXPERT}_scale"].view(torch.uint8)[3, 1:2].fill_(127),
            "gate_up_proj_scale has NaN or infinite",
        ),
        (
            lambda t: t.update({f"{EXPERT}_scale": t[f"{EXPERT}_scale"][:, :3].clone()}),
            r"expert 3: weight_scale is .*\(64, 3\)",
        ),
    ],
)
def test_a_scale_that_is_missing_or_no_number_or_of_another_shape_is_found_while_loading(checkpoint, change, match):
    folder, _, _ = checkpoint
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=match):
        from_pretrained(folder, experts_quantization="nvfp4")


def test_its_experts_are_packed_for_training(checkpoint, tmp_path):
    folder, _, values = checkpoint
    convert_checkpoint(folder, tmp_path / "packed", quantize="nf4")
    c_proj = from_pretrained(tmp_path / "packed").model.layers[1].mlp.experts.c_proj.dequantize()[2].float()
    expected = values["model.layers.1.mlp.experts.2.down_proj.weight"].float()
    assert (c_proj - expected).norm() < 0.12 * expected.norm()
    with pytest.raises(ValueError, match=r"quantized already \(nvfp4\).*load the bf16 checkpoint"):
        from_pretrained(folder, experts_quantization="nf4")


@loads_matrices
def test_experts_without_a_gate_are_taken_as_they_are(tmp_path):
    sizes = {"hidden_size": 64, "moe_latent_size": 32, "moe_intermediate_size": 64}
    make(tmp_path, "nemotron_h", **sizes)
    stored, values = to_nvfp4(tmp_path)
    experts = from_pretrained(tmp_path, experts_quantization="nvfp4").model.layers[1].mixer.experts
    for name in ("up_proj", "down_proj"):
        weight = getattr(experts, name)
        for expert, found in enumerate(weight.dequantize(torch.bfloat16)):
            full_name = next(key for key in stored if key.endswith(f"layers.1.mixer.experts.{expert}.{name}.weight"))
            assert torch.equal(weight.codes[expert], stored[full_name]) and torch.equal(found, values[full_name])


def test_what_is_no_nvfp4_is_refused(checkpoint):
    folder, stored, _ = checkpoint

    def refused(match, tensors=stored, **declared):
        rewrite(folder, tensors)
        edit_config(folder, quantization_config={**DECLARED_NVFP4, **declared})
        assert_conversion_refused(folder, match, "hub")

    refused("ModelOpt as 'FP8'.*'NVFP4' in groups of 16", quant_algo="FP8")
    refused("in groups of 32; 'NVFP4' in groups of 16", group_size=32)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    refused(f"{name}_scale_2 is missing", {k: v for k, v in stored.items() if k != f"{name}_scale_2"})
    refused(
        f"{name}_scale has shape .* must be", {**stored, f"{name}_scale": stored[f"{name}_scale"][:, :2].contiguous()}
    )
    refused(
        "pre_quant_scale is unknown",
        {**stored, "model.layers.0.mlp.experts.1.up_proj.pre_quant_scale": torch.ones(64)},
    )
    refused("declared to be in NVFP4, but no weight is", checkpoint[2])
