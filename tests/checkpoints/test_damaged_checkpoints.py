"""Damaged checkpoints: conversion never guesses, mixes up, or leaves half a checkpoint behind."""

import json
import os
from collections import namedtuple
from functools import partial

import pytest
import torch
from helpers.checkpoints import assert_conversion_refused as assert_refused
from helpers.checkpoints import (
    config_in,
    edit_config,
    edit_tensors,
    make,
    rewrite,
    same_bits,
    tensors_in,
)
from helpers.models import CONFIGS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, convert_adapter, convert_checkpoint
from sonicmoe_hf.checkpoints.reading.source import Source
from sonicmoe_hf.trainer.resume import restore

pytestmark = pytest.mark.pinned

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
EXPERTS = "num_local_experts" if "num_local_experts" in CONFIGS["qwen3_moe"]().to_dict() else "num_experts"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def hub(tmp_path):
    make(tmp_path / "hub", "qwen3_moe")
    return tmp_path / "hub"


@pytest.fixture
def native(tmp_path, hub):
    convert_checkpoint(hub, tmp_path / "native")
    return tmp_path / "native"


@pytest.mark.parametrize(
    "changes, match",
    [
        ({GATE: None}, f"{GATE} is missing"),
        ({NORM: None}, f"{NORM} is missing"),
        ({"mystery": torch.ones(1)}, "mystery is unknown"),
        ({GATE: torch.ones(32, 16)}, rf"{GATE} has shape \(32, 16\).*must be \(16, 32\)"),
        ({NORM: torch.ones(31)}, rf"{NORM} has shape \(31,\)"),
        ({GATE: torch.ones(16, 32)}, "needs one dtype"),
        ({GATE: torch.ones(16, 32, dtype=torch.int32)}, "weights are floats"),
        ({GATE: torch.ones(16, 32).to(torch.float8_e4m3fn)}, "declares no fp8"),
        ({GATE + "_scale_inv": torch.ones(1, 1)}, "_scale_inv is unknown"),
        ({"model.layers.1.mlp.experts.c_fc": torch.ones(8, 32, 32)}, "experts.c_fc is unknown"),
    ],
)
def test_a_wrong_tensor_is_named_and_nothing_is_written(hub, changes, match):
    edit_tensors(hub, changes)
    assert_refused(hub, match)


def test_experts_of_two_dtypes_can_be_cast_to_one(hub):
    tensors = tensors_in(hub)
    tensors[GATE] = tensors[GATE].float()
    rewrite(hub, tensors)
    assert_refused(hub, "give dtype=")
    convert_checkpoint(hub, hub.parent / "native", dtype="float32")
    experts = tensors_in(hub.parent / "native")["model.layers.1.mlp.experts.c_fc"]
    assert torch.equal(experts[3, 0::2], tensors[GATE])


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": 7}, "model_type is 7"),
        ({"model_type": "sonicmoe_qwen3_moe"}, "sonicmoe_layout_version is None"),
        ({"model_type": "sonicmoe_qwen3_moe", "sonicmoe_layout_version": 1}, "config and files contradict each other"),
        ({"model_type": "gpt_oss"}, "no experts of|contradict|unknown|missing"),
        ({EXPERTS: 7}, r"is unknown"),
        ({EXPERTS: 9}, r"experts.8.down_proj.weight .*is missing"),
        ({"moe_intermediate_size": 24}, "has shape"),
        ({"hidden_size": 40}, "has shape"),
        ({"num_hidden_layers": 1}, "is unknown"),
        ({"mlp_only_layers": [0, 1]}, "no mixture-of-experts layer"),
        ({"hidden_size": "wide"}, "describes no model that Transformers .* can build: .*hidden_size"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "quantized by 'fbgemm_fp8'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq in None bits"),
        (
            {"quantization_config": {"quant_method": "sonicmoe_hf", "experts": [1]}},
            r"the experts' format in quantization_config is \[1\]",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "declared to be in MXFP4, but no weight is"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}},
            "declared to be in FP8, but no weight is",
        ),
    ],
)
def test_a_config_that_contradicts_the_files_is_refused(hub, changes, match):
    edit_config(hub, **changes)
    assert_refused(hub, match)


def test_a_native_config_of_another_layout_version_or_family_is_refused(native):
    edit_config(native, sonicmoe_layout_version=2)
    assert_refused(native, "sonicmoe_layout_version is 2")
    edit_config(native, sonicmoe_layout_version=1, model_type="qwen3_moe")
    assert_refused(native, "config and files contradict each other")
    edit_config(native, model_type="sonicmoe_olmoe")
    assert_refused(native, "unknown|missing|has shape")


def test_a_native_config_restores_the_names_of_the_hubs_classes_and_nothing_else(native):
    kept = config_in(native)["sonicmoe_hub_config"]
    for number, damaged in enumerate([kept, {**kept, "num_experts_per_tok": 1}, ["auto_map"]]):
        edit_config(native, sonicmoe_hub_config=damaged)
        convert_checkpoint(native, native.parent / f"hub{number}", layout="hub")
        assert config_in(native.parent / f"hub{number}") == config_in(native.parent / "hub0")


def test_index_and_files_must_agree(hub):
    index_file = hub / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())

    def rewrite_index(**changes):
        index_file.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], **changes}}))

    rewrite_index(**{NORM: "model-00009-of-00009.safetensors"})
    assert_refused(hub, "there is no .*model-00009-of-00009.safetensors")
    rewrite_index(**{NORM: next(file for file in index["weight_map"].values() if file != index["weight_map"][NORM])})
    Source(hub)  # as Transformers, which reads whole files
    rewrite_index(lost=index["weight_map"][NORM])
    assert_refused(hub, "names lost, which is in none of the files")


def test_a_tensor_in_two_files_is_refused(hub):
    files = json.loads((hub / "model.safetensors.index.json").read_text())["weight_map"]
    other = hub / next(file for file in files.values() if file != files[NORM])
    save_file(load_file(other) | {NORM: 2 * tensors_in(hub)[NORM]}, other, metadata={"format": "pt"})
    assert_refused(hub, rf"has {NORM} in .* and in .*: remove the one that is out of date")


def test_a_single_file_beside_an_index_is_refused_because_transformers_loads_it(hub):
    doubled = {name: 2 * tensor for name, tensor in tensors_in(hub).items()}
    save_file(doubled, hub / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(hub).model.norm.weight
    assert torch.equal(loaded, doubled["model.norm.weight"].to(loaded.dtype)), "not the shards'"
    both = r"both model\.safetensors and model\.safetensors\.index\.json, .* remove the one"
    assert_refused(hub, both)


def test_a_single_file_that_the_index_names_is_no_contradiction(hub):
    tensors = tensors_in(hub)
    rewrite(hub, tensors)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (hub / "model.safetensors.index.json").write_text(json.dumps(index))
    Source(hub)


def test_what_else_transformers_would_load_in_place_of_the_files_is_refused(hub):
    edit_config(hub, transformers_weights="another.safetensors")
    assert_refused(hub, "transformers_weights is 'another.safetensors'")
    edit_config(hub, transformers_weights=None)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(hub)}
    (hub / "adapter_config.json").write_text(json.dumps(config))
    assert_refused(hub, r"both model\.safetensors\.index\.json and adapter_config")
    with pytest.raises(CheckpointError, match=r"both model\.safetensors\.index\.json and adapter_config"):
        convert_adapter(hub, hub.parent / "refused")


def test_weights_of_another_format_beside_are_left_and_named(hub):
    (hub / "pytorch_model.bin").write_bytes(b"older")
    assert "pytorch_model.bin" in convert_checkpoint(hub, hub.parent / "native").notices[0]
    assert not (hub.parent / "native" / "pytorch_model.bin").exists()


def test_damaged_files_are_named(hub):
    shard = sorted(hub.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    assert_refused(hub, f"{shard.name} is not a whole safetensors file")
    shard.write_bytes(b"")
    assert_refused(hub, f"{shard.name} is not a whole safetensors file")
    shard.unlink()
    assert_refused(hub, f"there is no .*{shard.name}")
    shard.write_bytes(whole)
    (hub / "config.json").write_text("{")
    assert_refused(hub, "config.json cannot be read")
    (hub / "config.json").unlink()
    assert_refused(hub, "No such file.*config.json")


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_short_is_named_by_from_pretrained_and_by_resuming(hub, packed):
    if packed:
        convert_checkpoint(hub, hub.parent / "packed", quantize="fp8")
        hub = hub.parent / "packed"
    model = sonicmoe_hf.from_pretrained(hub)
    shard = min(hub.glob("*.safetensors"))
    whole = shard.read_bytes()
    for left in (whole[:-10], whole[:40], b""):
        shard.write_bytes(left)
        for load in (sonicmoe_hf.from_pretrained, *([] if packed else [partial(restore, model)])):
            with pytest.raises(CheckpointError, match=f"{shard} is not a whole safetensors file"):
                load(hub)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_verify_refuses_values_that_are_not_finite(hub, value):
    tensors = tensors_in(hub)
    tensors[GATE][3, 5] = value
    rewrite(hub, tensors)
    assert_refused(hub, "model.layers.1.mlp.experts.c_fc has NaN or infinite values", verify=True)
    convert_checkpoint(hub, hub.parent / "moved")
    convert_checkpoint(hub.parent / "moved", hub.parent / "back", "hub")
    assert same_bits(tensors_in(hub.parent / "back"), tensors)


def test_blocks_whose_scale_is_no_number_are_not_moved(tmp_path):
    make(tmp_path / "source", "gpt_oss", "mxfp4")
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    edit_tensors(tmp_path / "source", lambda tensors: tensors[scales][3, 5, :1].fill_(255))
    assert_refused(tmp_path / "source", "down_proj_scales has NaN or infinite", quantize="mxfp4")


@pytest.mark.parametrize("damage", [torch.flatten, lambda tensor: tensor.flatten()[0], lambda tensor: tensor[None]])
@pytest.mark.parametrize(
    "format, layout, suffix",
    [
        ("nf4", "native", "_absmax"),
        ("mxfp4", "native", "_scales"),
        ("fp8", "native", "_values"),
        ("fp8", "native", "_scale_inv"),
        ("int4", "native", "_packed"),
        ("int4", "native", "_scale"),
        ("int4", "hub", "_packed"),
    ],
)
def test_a_packed_tensor_with_another_number_of_dimensions_is_named(tmp_path, format, layout, suffix, damage):
    make(tmp_path / "dense", "qwen3_moe", num_hidden_layers=1, hidden_size=128, moe_intermediate_size=128)
    convert_checkpoint(tmp_path / "dense", tmp_path / "packed", layout, quantize=format)
    name = ("model.layers.0.mlp.experts.c_proj" if layout == "native" else GATE.replace("s.1.", "s.0.")) + suffix
    edit_tensors(tmp_path / "packed", {name: damage(tensors_in(tmp_path / "packed")[name]).clone()})
    assert_refused(tmp_path / "packed", rf"model\.safetensors.*{name} .*\(", "hub" if layout == "native" else "native")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts.*_proj"):
        sonicmoe_hf.from_pretrained(tmp_path / "packed", experts_quantization=None if layout == "native" else format)


def test_verify_notices_a_disk_that_changes_bytes(hub, monkeypatch):
    from sonicmoe_hf.checkpoints.writing import atomic_folder

    def corrupting(tensors, path, metadata):
        save(tensors, path, metadata=metadata)
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))

    save = atomic_folder.save_file
    monkeypatch.setattr(atomic_folder, "save_file", corrupting)
    assert_refused(hub, "came back from disk changed", verify=True)


def test_a_full_disk_is_noticed_before_and_while_writing(hub, monkeypatch):
    from sonicmoe_hf.checkpoints.writing import atomic_folder

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(atomic_folder.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    assert_refused(hub, "GB free")
    monkeypatch.undo()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_folder, "save_file", full)
    assert_refused(hub, "No space left", error=OSError)
