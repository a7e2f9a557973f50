"""Experts packed in the hub's own layout: what Transformers loads is what the native layout of the same format holds."""

import pytest
import torch
from helpers.checkpoints import (
    SHARDS,
    assert_conversion_refused,
    config_in,
    load_whole,
    make,
    rewrite,
    same_bits,
    tensors_in,
)
from helpers.marks import rest_pinned

from sonicmoe_hf import convert_checkpoint
from sonicmoe_hf.checkpoints.reading.source import Source
from sonicmoe_hf.tools.cli.main import main

WHOLE_BLOCKS = {"hidden_size": 128, "moe_intermediate_size": 128}
FORMATS = (
    ("gpt_oss", "mxfp4", {"intermediate_size": 32}),
    ("qwen3_moe", "fp8", WHOLE_BLOCKS),
    ("olmoe", "fp8", {"hidden_size": 128, "intermediate_size": 128}),
    ("deepseek_v3", "fp8", WHOLE_BLOCKS),
)
every_format = pytest.mark.parametrize("family, format, sizes", rest_pinned(FORMATS, 2))


@every_format
def test_it_loads_in_transformers_with_the_values_of_the_native_layout(family, format, sizes, tmp_path):
    make(tmp_path / "bf16", family, **sizes)
    done = convert_checkpoint(
        tmp_path / "bf16", tmp_path / "packed", "hub", quantize=format, max_shard_size=SHARDS, verify=True
    )
    assert done.shards > 1 and done.target_layout == ("gpt_oss" if family == "gpt_oss" else "per_expert")
    assert Source(tmp_path / "packed").quantization == format
    convert_checkpoint(tmp_path / "bf16", tmp_path / "native", quantize=format)
    convert_checkpoint(tmp_path / "native", tmp_path / "dense", "hub", dequantize=True)
    assert same_bits(*(load_whole(tmp_path / name, torch.bfloat16).state_dict() for name in ("packed", "dense")))
    original, packed = tensors_in(tmp_path / "bf16"), tensors_in(tmp_path / "packed")
    beside = [name for name in original if ".experts." not in name or "bias" in name]
    assert same_bits({name: packed[name] for name in beside}, {name: original[name] for name in beside})


@every_format
def test_blocks_move_between_the_layouts_bit_for_bit(family, format, sizes, tmp_path):
    make(tmp_path / "bf16", family, **sizes)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "packed", "hub", quantize=format)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "native", quantize=format)
    convert_checkpoint(tmp_path / "native", tmp_path / "to hub", "hub", quantize=format, verify=True)
    convert_checkpoint(tmp_path / "packed", tmp_path / "to native", quantize=format)
    assert same_bits(tensors_in(tmp_path / "to hub"), tensors_in(tmp_path / "packed"))
    assert same_bits(tensors_in(tmp_path / "to native"), tensors_in(tmp_path / "native"))
    declared = [config_in(tmp_path / name)["quantization_config"] for name in ("to hub", "packed")]
    assert declared[0] == declared[1]
    convert_checkpoint(tmp_path / "packed", tmp_path / "again", "hub", quantize=format)
    assert same_bits(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "packed"))
    assert config_in(tmp_path / "again") == config_in(tmp_path / "packed")


def test_fp8_says_which_layers_are_not_in_it(tmp_path):
    make(tmp_path / "bf16", "deepseek_v3", num_nextn_predict_layers=1, **WHOLE_BLOCKS)
    tensors = tensors_in(tmp_path / "bf16")
    again = {name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in tensors.items()}
    again["model.layers.2.eh_proj.weight"] = torch.randn(128, 256)  # of the layer for multi-token prediction
    rewrite(tmp_path / "bf16", {**tensors, **again})
    folders = [str(tmp_path / name) for name in ("bf16", "fp8")]
    assert main(["convert", *folders, "--layout", "hub", "--quantize", "fp8"]) == 0
    declared = config_in(tmp_path / "fp8")["quantization_config"]
    assert declared["weight_block_size"] == [128, 128] and declared["activation_scheme"] == "dynamic"
    stored = tensors_in(tmp_path / "fp8")
    matrices = {name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dim() == 2}
    dense = {name for name in matrices if f"{name}.weight_scale_inv" not in stored and "_scale_inv" not in name}
    assert {"model.layers.2.eh_proj", "model.layers.2.mlp.experts.7.up_proj"} < dense
    assert dense | {"lm_head"} == set(declared["modules_to_not_convert"])
    assert {"lm_head", "model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.gate"} < dense


def test_what_the_hub_has_no_layout_for_is_refused(tmp_path):
    make(tmp_path / "qwen3_moe", "qwen3_moe", **WHOLE_BLOCKS)
    make(tmp_path / "gpt_oss", "gpt_oss", intermediate_size=32)
    make(tmp_path / "odd", "qwen3_moe", hidden_size=192, moe_intermediate_size=128)
    make(tmp_path / "odd experts", "qwen3_moe", hidden_size=128, moe_intermediate_size=192)
    convert_checkpoint(tmp_path / "qwen3_moe", tmp_path / "nvfp4", quantize="nvfp4")
    for source, format, match in (
        ("qwen3_moe", "mxfp4", "no layout for the experts of qwen3_moe in mxfp4, only for fp8 or int4"),
        ("qwen3_moe", "nvfp4", "in nvfp4, only for fp8 or int4; for training, --layout native packs in every format"),
        ("gpt_oss", "fp8", "no layout for the experts of gpt_oss in fp8, only for mxfp4"),
        ("odd", "fp8", "sizes 192 and 128, of which not both are multiples of 128"),
        ("odd experts", "fp8", "sizes 128 and 192, of which not both are multiples of 128"),
        ("nvfp4", "fp8", "are nvfp4 already, and rounding twice loses more"),
    ):
        assert_conversion_refused(tmp_path / source, match, "hub", quantize=format)
    words = "leaves other tensors their dtype"
    assert_conversion_refused(tmp_path / "qwen3_moe", words, "hub", quantize="fp8", dtype="float16")
