"""Adapters merged into checkpoints whose experts are in integers, and conversion of these, from the hub's own files."""

import shutil

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import config_in, edit_tensors, make, packed_in, same_bits, tensors_in
from helpers.integers import EXPERTS, format_of, to_integers
from helpers.marks import loads_matrices, rest_pinned, rest_slow

from sonicmoe_hf import CheckpointError, convert_checkpoint, from_pretrained, merge_adapter, quantize_experts
from sonicmoe_hf.tools.comparing import relative_error

SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
KINDS = ["ct-32", "gptq-asym", "ct-asym", "awq", "auto-round", "gptq-v2"]
pytestmark = loads_matrices


def base_and_adapter(folder, kind, size):
    make(folder / "base", "qwen3_moe", **SIZES)
    _, dense = to_integers(folder / "base", kind)
    edit_tensors(folder / "dense", {name: tensor.bfloat16() for name, tensor in dense.items()})
    model = from_pretrained(folder / "base", experts_quantization="int4", dtype=torch.bfloat16)
    adapt(model, folder / "adapter", size=size)
    return folder / "base", folder / "adapter"


@pytest.mark.parametrize("kind", rest_pinned(KINDS, 2))
def test_an_adapter_is_merged_into_bf16_and_into_the_files_own_form(kind, tmp_path):
    base, adapter = base_and_adapter(tmp_path, kind, 0.05)
    merge_adapter(base, adapter, tmp_path / "bf16", verify=True)
    merge_adapter(tmp_path / "dense", adapter, tmp_path / "expected")
    exact = tensors_in(tmp_path / "bf16")
    assert same_bits(exact, tensors_in(tmp_path / "expected"))
    assert "quantization_config" not in config_in(tmp_path / "bf16")

    done = merge_adapter(base, adapter, tmp_path / "kept", quantize="keep", verify=True)
    before, after = tensors_in(base), tensors_in(tmp_path / "kept")
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    assert config_in(tmp_path / "kept") == config_in(base)
    ends = ("zeros", "zero_point", "g_idx", "weight_shape", "norm.weight")
    assert all(torch.equal(before[name], after[name]) for name in before if name.endswith(ends))
    convert_checkpoint(tmp_path / "kept", tmp_path / "kept in bf16", "hub", dequantize=True)
    rounded = tensors_in(tmp_path / "kept in bf16")
    lossy = [name for name in exact if not torch.equal(exact[name], rounded[name])]
    assert lossy and all("experts" in name or "_proj" in name for name in lossy)
    # a step is two fifteenths of a group's largest value, and dithering errs by its sixth part in the mean square
    assert all(relative_error(rounded[name], exact[name]) < 0.2 for name in lossy)
    assert all(layer.survived > 0.8 for layer in done.roundings)


def scale_norms(folder, factor):
    """Fold factors into the norms before the experts, and out of what reads them, as AWQ does before it packs."""
    edits = {}
    for name, tensor in tensors_in(folder).items():
        if name.endswith("post_attention_layernorm.weight"):
            edits[name] = tensor * factor
        elif name.endswith(("mlp.gate.weight", "gate_proj.weight", "up_proj.weight")):
            edits[name] = tensor / factor
    edit_tensors(folder, edits)


@pytest.mark.pinned
def test_an_adapter_of_awq_is_not_merged_into_the_weights_from_before_it_scaled_them(tmp_path):
    make(tmp_path / "original", "qwen3_moe", **SIZES)
    shutil.copytree(tmp_path / "original", tmp_path / "base")
    scale_norms(tmp_path / "base", 2 ** torch.randn(SIZES["hidden_size"], generator=torch.manual_seed(0)))
    to_integers(tmp_path / "base", "awq", EXPERTS)
    model = from_pretrained(tmp_path / "base", experts_quantization="int4", dtype=torch.bfloat16)
    adapt(model, tmp_path / "adapter", size=0.05)
    with pytest.raises(CheckpointError, match=r"beside other norms than .*original has: AWQ scales"):
        merge_adapter(tmp_path / "original", tmp_path / "adapter", tmp_path / "merged")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")  # the remedies
    convert_checkpoint(tmp_path / "base", tmp_path / "converted", "hub", dequantize=True)
    merge_adapter(tmp_path / "converted", tmp_path / "adapter", tmp_path / "merged after conversion")


@pytest.mark.pinned
@pytest.mark.parametrize("kind", rest_slow(KINDS, 2))
def test_an_adapter_that_changes_nothing_leaves_every_byte(kind, tmp_path):
    base, adapter = base_and_adapter(tmp_path, kind, 0.0)
    merge_adapter(base, adapter, tmp_path / "kept", quantize="keep")
    assert same_bits(tensors_in(tmp_path / "kept"), tensors_in(base))


@pytest.mark.parametrize("kind", rest_pinned(KINDS))
def test_conversion_moves_codes_scales_and_zeros_into_native_order(kind, tmp_path):
    make(tmp_path / "base", "qwen3_moe", **SIZES)
    _, dense = to_integers(tmp_path / "base", kind)
    convert_checkpoint(tmp_path / "base", tmp_path / "native", quantize=format_of(kind).name, verify=True)
    model = from_pretrained(tmp_path / "native")
    c_fc = packed_in(model)["model.layers.1.mlp.experts.c_fc"].dequantize(torch.float32)
    for place, part in enumerate(("gate", "up")):
        expected = [dense[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] for expert in range(len(c_fc))]
        assert torch.equal(c_fc[:, place::2], torch.stack(expected))


def test_an_adapter_is_merged_into_the_original_and_packed_as_the_hub_has_integers(tmp_path):
    make(tmp_path / "bf16", "qwen3_moe", **SIZES)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "base", "hub", dtype="float32")  # so that merging rounds nothing
    adapt(from_pretrained(tmp_path / "base"), tmp_path / "adapter", size=0.05)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", quantize="int4", verify=True)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "exact")
    model = quantize_experts(from_pretrained(tmp_path / "exact"), "int4")
    merged = from_pretrained(tmp_path / "merged", experts_quantization="int4")
    for name, weight in packed_in(merged).items():
        assert torch.equal(weight.codes, packed_in(model)[name].codes)
