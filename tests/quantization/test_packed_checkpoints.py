"""Packed checkpoints: made by conversion, read by everything, and dense again on request."""

import shutil

import pytest
import torch
from helpers.adapters import NATIVE_EXPERTS, adapt
from helpers.checkpoints import assert_conversion_refused as refused
from helpers.checkpoints import config_in, edit_tensors, make, packed_in, same_bits, tensors_in
from helpers.marks import crossed
from helpers.models import OF_64, batch
from transformers import AutoModelForCausalLM, Mxfp4Config

from sonicmoe_hf import (
    CheckpointError,
    convert_checkpoint,
    from_pretrained,
    merge_adapter,
    patch_model,
    quantize_experts,
)
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.tools.cli.main import main

SIZES = {family: {**OF_64[family], "num_hidden_layers": 2} for family in ("qwen3_moe", "gpt_oss")}
BATCH = batch(2, 8)


def error_of_tokens(logits, expected):
    """Compute the relative error of the median token: in bf16 one whose experts' scores are close may be routed
    otherwise."""
    return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median()


def convert(source, target, *options):
    return main(["convert", str(source), str(target), "--max-shard-size", "30KB", "--verify", *options])


@pytest.mark.parametrize("family, name", crossed(SIZES, FORMATS, everywhere=2))
def test_a_checkpoint_is_packed_by_conversion_and_dense_again(family, name, tmp_path, capsys):
    make(tmp_path / "hub", family, **SIZES[family])
    assert convert(tmp_path / "hub", tmp_path / "native", "--layout", "native") == 0
    assert convert(tmp_path / "hub", tmp_path / "packed", "--layout", "native", "--quantize", name) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"the experts are {name} now, and differ from the weights before by" in told
    model = from_pretrained(tmp_path / "packed")
    expected = quantize_experts(from_pretrained(tmp_path / "native"), name)
    assert same_bits(model.state_dict(), expected.state_dict()) and len(packed_in(model)) == 4
    assert torch.equal(model(**BATCH).logits, expected(**BATCH).logits)
    assert model.dtype == torch.bfloat16 and {weight.format for weight in packed_in(model).values()} == {name}
    # what from_pretrained(experts_quantization=) saves is the same kind of checkpoint
    model.save_pretrained(tmp_path / "saved")
    assert same_bits(tensors_in(tmp_path / "saved"), tensors_in(tmp_path / "packed"))

    for target in ("hub", "native"):
        capsys.readouterr()
        assert convert(tmp_path / "saved", tmp_path / f"dense {target}", "--layout", target) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert f"the weights were {name} and are bfloat16 now" in told
        assert f"what rounding to {name} lost stays lost" in told
    assert config_in(tmp_path / "dense hub").keys() == config_in(tmp_path / "hub").keys()
    stored = tensors_in(tmp_path / "dense native")
    assert all(torch.equal(weight.dequantize(), stored[key]) for key, weight in packed_in(model).items())
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense hub", dtype=torch.float32)
    assert error_of_tokens(model(**BATCH).logits.float(), dense(**BATCH).logits) < 0.02  # bf16


def test_mxfp4_blocks_are_moved_and_never_rounded_again(tmp_path):
    make(tmp_path / "gpt", "gpt_oss", "mxfp4", **SIZES["gpt_oss"])
    convert_checkpoint(tmp_path / "gpt", tmp_path / "native", quantize="mxfp4", verify=True)
    before, after = tensors_in(tmp_path / "gpt"), tensors_in(tmp_path / "native")
    for theirs, ours in (("gate_up_proj", "c_fc"), ("down_proj", "c_proj")):
        for end in ("blocks", "scales"):
            names = [key for key in before if key.endswith(f"{theirs}_{end}")]
            assert len(names) == 2
            assert all(torch.equal(before[key], after[key.replace(theirs, ours)]) for key in names)
    convert_checkpoint(tmp_path / "native", tmp_path / "hub", "hub")
    assert "quantization_config" not in config_in(tmp_path / "hub")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt", quantization_config=Mxfp4Config(dequantize=True))
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert same_bits(dict(dense.state_dict()), dict(theirs.state_dict()))

    # gate and up rows change places, and with them their blocks
    make(tmp_path / "qwen3", "qwen3_moe", **SIZES["qwen3_moe"])
    fused = from_pretrained(tmp_path / "qwen3", experts_quantization="mxfp4")
    fused.save_pretrained(tmp_path / "fused")
    convert_checkpoint(tmp_path / "fused", tmp_path / "interleaved", quantize="mxfp4")
    gate, up = fused.model.layers[1].mlp.experts.gate_up_proj.dequantize().chunk(2, dim=1)
    c_fc = from_pretrained(tmp_path / "interleaved").model.layers[1].mlp.experts.c_fc.dequantize()
    assert torch.equal(c_fc[:, 0::2], gate) and torch.equal(c_fc[:, 1::2], up)


@pytest.mark.parametrize("family, name", crossed(SIZES, FORMATS, everywhere=1))
def test_an_adapter_is_merged_into_what_it_was_trained_on(family, name, tmp_path):
    sizes = SIZES[family]
    if name in ("fp8", "nvfp4"):  # blocks that are cut off
        sizes = dict(zip(sizes, (144, 80, 2)))
    make(tmp_path / "hub", family, **sizes)
    convert_checkpoint(tmp_path / "hub", tmp_path / "packed", quantize=name)
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "native")
    adapted = adapt(from_pretrained(tmp_path / "packed"), tmp_path / "adapter", NATIVE_EXPERTS, size=0.05)
    done = merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged", "hub", verify=True)
    assert any(f"were {name} and are bfloat16 now" in notice for notice in done.notices)
    merge_adapter(tmp_path / "dense", tmp_path / "adapter", tmp_path / "expected", "hub")
    assert same_bits(tensors_in(tmp_path / "merged"), tensors_in(tmp_path / "expected"))
    assert "quantization_config" not in config_in(tmp_path / "merged")
    with torch.no_grad():
        served = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(**BATCH).logits
        trained = adapted(**BATCH).logits.float()
    assert error_of_tokens(trained, served) < 0.02  # bf16


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    make(folder / "hub", "qwen3_moe", **SIZES["qwen3_moe"])
    convert_checkpoint(folder / "hub", folder / "nf4", quantize="nf4")
    return folder


def test_experts_that_become_dense_are_saved_and_loaded_from_host_memory(packed, tmp_path):
    model = from_pretrained(packed / "hub", experts_quantization="nf4").dequantize()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    patch_model(model, experts_memory=0)
    assert same_bits(model.state_dict(), expected)
    model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in expected.items()})
    assert not any(tensor.any() for tensor in model.state_dict().values())
    model.load_state_dict(expected)
    model.save_pretrained(tmp_path / "saved")
    assert same_bits(from_pretrained(tmp_path / "saved").state_dict(), expected)


def test_conversions_that_would_lose_more_or_make_no_sense_are_refused(packed, tmp_path):
    refused(packed / "hub", "no layout for .* in nf4, only for fp8", "hub", quantize="nf4")
    refused(packed / "hub", "contradict each other", quantize="nf4", dequantize=True)
    refused(packed / "nf4", "packed as mxfp4, but are nf4 already", quantize="mxfp4")
    refused(packed / "nf4", "packed as nf4 already; from_pretrained loads it", quantize="nf4")
    refused(packed / "nf4", r"is quantized \(nf4\): conversion can only dequantize", "hub", dequantize=False)
    make(tmp_path / "odd", "qwen3_moe")
    refused(
        tmp_path / "odd",
        r"layers\.0\.mlp\.experts\.c_proj: nf4 packs rows of a multiple of 64 values,.* or fp8",
        quantize="nf4",
    )
    key = "model.layers.1.mlp.experts.0.down_proj.weight"
    make(tmp_path / "nan", "qwen3_moe", **SIZES["qwen3_moe"])
    edit_tensors(tmp_path / "nan", lambda tensors: tensors[key].fill_(float("nan")))
    refused(tmp_path / "nan", r"layers\.1\.mlp\.experts\.c_proj: .*NaN or infinite", quantize="mxfp4")
    with pytest.raises(
        ValueError, match=r"quantize is 'int3'; choose one of 'nf4', 'mxfp4', .* 'uint4' \(int4 with a zero"
    ):
        convert_checkpoint(packed / "hub", tmp_path / "out", quantize="int3")


@pytest.mark.pinned
@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: {"c_fc_absmax": t["c_fc_absmax"][:, :-1].contiguous()}, "c_fc_absmax has shape .* must be"),
        (
            lambda t: {"c_fc_codes": t["c_fc_codes"].view(torch.int8)},
            "c_fc_codes has .* of torch.int8; .* of torch.uint8",
        ),
        (lambda t: {"c_fc_state": t["c_fc_state"] * float("nan")}, "c_fc_state has NaN or infinite values"),
        (
            lambda t: {"c_fc_state": t["c_fc_state"].index_fill(0, torch.tensor([-1]), float("inf"))},
            "c_fc_state has NaN or infinite values",
        ),
        (lambda t: {"c_fc_state": t["c_fc_state"].roll(1)}, "c_fc_state has other values than NF4's 16"),
        (lambda t: {"c_fc_state": None}, "c_fc_state is missing"),
    ],
)
def test_damaged_packed_weights_are_errors_that_name_them(packed, tmp_path, change, match):
    prefix, folder = "model.layers.1.mlp.experts.", tmp_path / "damaged"
    shutil.copytree(packed / "nf4", folder)
    changed = change({key.removeprefix(prefix): tensor for key, tensor in tensors_in(folder).items()})
    edit_tensors(folder, {prefix + key: tensor for key, tensor in changed.items()})
    refused(folder, match, "hub")
    with pytest.raises((CheckpointError, RuntimeError, ValueError)):
        from_pretrained(folder)
