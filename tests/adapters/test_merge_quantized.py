"""A merged checkpoint in the format of its base: untouched tensors bit for bit, the others on the format's grid, and
loaded by Transformers alone as the base was."""

from functools import partial

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.checkpoints import (
    SHARDS,
    config_in,
    edit_config,
    edit_tensors,
    fp8_by_transformers,
    load_whole,
    make,
    same_bits,
    tensors_in,
    to_nvfp4,
)
from helpers.marks import rest_pinned
from helpers.memory import bytes_in, peak_of_a_process, reads_peaks
from helpers.models import build, logits_of, relative_error
from peft import LoraConfig, get_peft_model

from sonicmoe_hf import CheckpointError, convert_checkpoint, merge_adapter
from sonicmoe_hf.formats.float_matrices import FP8Matrix, NVFP4Matrix
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.tools.cli.main import main

BLOCK = (8, 8)  # divides every size: Transformers takes other blocks where they are cut off
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
KINDS = (("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "fp8"))
every_kind = pytest.mark.parametrize("family, kind", rest_pinned(KINDS, 2))


def adapt(model, folder, size, parameters=(GATE_UP, DOWN), modules=("o_proj",), **options):
    """Put PEFT's adapter of this size on the model, and save it in `folder`."""
    config = LoraConfig(r=2, lora_alpha=2, target_modules=list(modules), target_parameters=list(parameters), **options)
    return save_with_factors(get_peft_model(model, config), folder, size**0.5)


def base_and_adapter(folder, family, kind, size, **options):
    make(folder / "base", family, kind, fp8_block=BLOCK)
    convert_checkpoint(folder / "base", folder / "dense", "hub", dequantize=True)
    adapt(load_whole(folder / "dense"), folder / "adapter", size, **options)
    return folder / "base", folder / "adapter", folder / "merged"


@every_kind
def test_it_comes_back_in_the_format_of_the_base_and_loads_in_transformers(family, kind, tmp_path):
    base, adapter, merged = base_and_adapter(tmp_path, family, kind, 0.3)
    done = merge_adapter(base, adapter, merged, quantize="keep", max_shard_size=SHARDS, verify=True)
    before, after = tensors_in(base), tensors_in(merged)
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    assert config_in(merged) == config_in(base) and done.shards > 1
    convert_checkpoint(merged, tmp_path / "merged dense", "hub", dequantize=True)
    ours, theirs = load_whole(tmp_path / "merged dense", torch.bfloat16), load_whole(merged, torch.bfloat16)
    assert same_bits(ours.state_dict(), theirs.state_dict()), "Transformers reads the values that were meant"
    merge_adapter(base, adapter, tmp_path / "bf16")
    exact, rounded = tensors_in(tmp_path / "bf16"), tensors_in(tmp_path / "merged dense")
    lossy = {name for name in exact if not torch.equal(exact[name], rounded[name])}
    assert lossy and all("experts" in name or "o_proj" in name for name in lossy)
    largest = {"mxfp4": 0.185, "fp8": 0.057}[
        kind
    ]  # of normally distributed values dithered: of nearest, times sqrt(2)
    for name in lossy:
        assert relative_error(rounded[name], exact[name]) < largest, name
    assert {layer.layer for layer in done.roundings} <= {"model.layers.0", "model.layers.1"}
    assert all(layer.survived > 0.8 and layer.change > 0 for layer in done.roundings)
    assert not any("warning" in notice for notice in done.notices)


@pytest.mark.pinned
@every_kind
def test_what_the_adapter_leaves_alone_is_copied_bit_for_bit(family, kind, tmp_path):
    options = {"parameters": [GATE_UP], "layers_to_transform": [1], "modules": ["o_proj"]}
    base, adapter, merged = base_and_adapter(tmp_path, family, kind, 1.0, **options)
    merge_adapter(base, adapter, merged, quantize="keep")
    before, after = tensors_in(base), tensors_in(merged)
    changed = {name for name in before if not same_bits({name: before[name]}, {name: after[name]})}
    weights = ("o_proj", "gate_up_proj", "gate_proj", "up_proj")
    assert changed and all(any(f".{weight}" in name for weight in weights) for name in changed)
    assert not any(".layers.0.self_attn" in name or "shared_experts" in name for name in changed)
    assert len({name.split(".experts.")[1].split(".")[0] for name in changed if ".experts." in name}) in (2, 8)


@pytest.mark.pinned
@every_kind
def test_a_change_under_the_formats_steps_is_lost_and_said_to_be(family, kind, tmp_path):
    base, adapter, merged = base_and_adapter(tmp_path, family, kind, 1e-5)
    done = merge_adapter(base, adapter, merged, quantize="keep", rounding="nearest")
    assert all(layer.survived < 0.5 and layer.error > 0.5 * layer.change for layer in done.roundings)
    warning = next(notice for notice in done.notices if notice.startswith("warning"))
    assert (
        "more than half of the adapter's change in 2 of 2 layers: merge it by --rounding dithered, or serve" in warning
    )
    before, after = tensors_in(base), tensors_in(merged)
    scales = [name for name in before if name.endswith(("_scales", "_scale_inv")) and ".experts." in name]
    kept = torch.cat([(before[name] == after[name]).flatten().float() for name in scales]).mean()
    assert kept == 1 if kind == "mxfp4" else kept > 0.9, "a scale moves only where that brings the change nearer"


@pytest.mark.pinned
def test_new_scales_are_powers_of_two_where_the_base_says_so_and_the_change_is_the_adapters_alone(tmp_path):
    base, adapter, merged = base_and_adapter(tmp_path, "deepseek_v3", "fp8", 1.0)
    edit_config(base, quantization_config={**config_in(base)["quantization_config"], "scale_fmt": "ue8m0"})
    larger = merge_adapter(base, adapter, merged, quantize="keep")
    before, after = tensors_in(base), tensors_in(merged)
    moved = [after[name][after[name] != before[name]] for name in before if name.endswith("_scale_inv")]
    assert torch.all(torch.frexp(torch.cat(moved))[0] == 0.5) and torch.cat(moved).numel()
    adapt(load_whole(tmp_path / "dense"), tmp_path / "smaller", 1e-5)
    smaller = merge_adapter(base, tmp_path / "smaller", tmp_path / "merged too", quantize="keep")
    for large, small in zip(larger.roundings, smaller.roundings, strict=True):
        assert small.change == pytest.approx(1e-5 * large.change, rel=0.02), "bf16 would round it away"


def test_a_module_that_the_adapter_holds_whole_takes_the_place_of_the_bases(tmp_path):
    """modules_to_save: a head beside the format, and a linear layer that is in it."""
    whole = {"modules": ("q_a_proj",), "modules_to_save": ["lm_head", "o_proj"]}
    base, adapter, merged = base_and_adapter(tmp_path, "deepseek_v3", "fp8", 0.3, **whole)
    saved = {name: tensor for name, tensor in tensors_in(adapter).items() if "lora" not in name}
    trained = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in saved.items()}
    edit_tensors(adapter, trained)
    merge_adapter(base, adapter, merged, quantize="keep")
    convert_checkpoint(merged, tmp_path / "merged dense", "hub", dequantize=True)
    found = tensors_in(tmp_path / "merged dense")
    assert len(trained) == 3
    for name, tensor in trained.items():
        error = relative_error(found[name.removeprefix("base_model.model.")], tensor)
        assert error < (0.004 if "lm_head" in name else 0.04), "of bf16 and of FP8"


@pytest.mark.pinned
def test_nvfp4_keeps_the_scales_of_whole_tensors(tmp_path):
    make(tmp_path / "base", "qwen3_moe", hidden_size=64, moe_intermediate_size=32)
    stored, _ = to_nvfp4(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "dense", "hub", dequantize=True)
    adapt(load_whole(tmp_path / "dense"), tmp_path / "adapter", 0.03)
    done = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", quantize="keep", verify=True)
    merged = tensors_in(tmp_path / "merged")
    assert {n: (t.dtype, t.shape) for n, t in merged.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    whole = [name for name in stored if name.endswith(("_scale_2", "input_scale", "k_scale"))]
    assert whole and same_bits({n: merged[n] for n in whole}, {n: stored[n] for n in whole})
    assert config_in(tmp_path / "merged") == config_in(tmp_path / "base")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "bf16")
    convert_checkpoint(tmp_path / "merged", tmp_path / "merged dense", "hub", dequantize=True)
    exact, rounded = tensors_in(tmp_path / "bf16"), tensors_in(tmp_path / "merged dense")
    worst = max(relative_error(rounded[name], exact[name]) for name in exact)
    assert 0.02 < worst < 0.2, "NVFP4's steps, and values over the largest that the tensor's scale allows"
    assert all(layer.survived > 0.7 for layer in done.roundings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_an_unchanged_fp8_weight_keeps_its_bits_and_a_changed_one_is_rounded_as_well_as_anew(dtype):
    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    _, scales = fp8_by_transformers(weight, (8, 8))
    scales = scales.bfloat16() if dtype == torch.bfloat16 else scales
    if dtype.itemsize == 1:
        exponent = torch.frexp(scales)[1]
        scales, factors = (exponent + 127).to(torch.uint8).view(dtype), torch.exp2(exponent.float())
    else:
        factors = scales.float()
    factors = factors.repeat_interleave(8, 0).repeat_interleave(8, 1)
    stored = (weight / factors).to(torch.float8_e4m3fn)
    grid = FP8Matrix((8, 8)).grid(scales)
    same = grid.round(stored.float() * factors, scales)
    assert same_bits({"codes": same.codes, "scales": same.scales}, {"codes": stored, "scales": scales})
    changed = stored.float() * factors + 3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    assert relative_error(grid.round(changed, scales).values, changed) < 0.04, "E4M3's 3 bits of mantissa"


def test_powers_of_two_stay_powers_of_two():
    weight = torch.randn(20, 36, generator=torch.Generator().manual_seed(0))
    scales = torch.full((3, 5), 2.0**-20)
    rounded = FP8Matrix((8, 8), has_powers=True).grid(scales).round(weight, scales)
    assert torch.all(torch.frexp(rounded.scales)[0] == 0.5)
    assert rounded.values.shape == weight.shape and relative_error(rounded.values, weight) < 0.04, "blocks are cut off"


def test_of_powers_of_two_the_smallest_that_holds_a_blocks_largest_value_is_taken():
    """1 holds 448 of E4M3 and 6 of E2M1; half of it half as much, and of more it takes 2."""
    held = torch.tensor([1.0, 0.5, 1.001, 0.999])
    for grid, largest in ((FP8Matrix(BLOCK).grid(held.to(torch.uint8)), 448), (FORMATS["mxfp4"].grid(), 6)):
        assert grid.new_scales(held * largest).tolist() == [127, 126, 128, 127]
    powers = FP8Matrix(BLOCK, has_powers=True).grid(held).new_scales(held * 448)
    assert powers.tolist() == [1.0, 0.5, 2.0, 1.0]


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_four_bits_are_rounded_at_least_as_well_as_anew(format):
    weight = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 3, 32:] = 0.0  # NVFP4's scale of these is zero
    packed = FORMATS[format].quantize(weight)
    grid = FORMATS["mxfp4"].grid() if format == "mxfp4" else NVFP4Matrix().grid(packed.scales, packed.state)
    scales = packed.scales[0] if format == "mxfp4" else packed.scales[0].view(torch.float8_e4m3fn)
    values = FORMATS[format].dequantize(packed, torch.float32)[0]
    same = grid.round(values, scales)
    assert torch.equal(same.codes, packed.codes[0]) and torch.equal(same.scales.view(torch.uint8), packed.scales[0])
    changed = values + 0.5 * torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    anew = FORMATS[format].quantize(changed[None])
    if format == "nvfp4":  # its tensor's scale stays
        changed = changed.clamp(values.min(), values.max())
        anew = FORMATS[format].quantize(changed[None])
    error = relative_error(grid.round(changed, scales).values, changed)
    new_error = relative_error(FORMATS[format].dequantize(anew, torch.float32)[0], changed)
    assert error <= new_error * 1.02  # NVFP4: another scale


@pytest.mark.parametrize(
    "family, format", rest_pinned([("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8")])
)
def test_a_bf16_base_is_merged_and_packed_in_one_go(family, format, tmp_path):
    largest = 0.6 if format == "mxfp4" else 0.15  # 12% and 3% of each weight, through a router's choices
    sizes = {"intermediate_size": 32} if family == "gpt_oss" else {"hidden_size": 128, "moe_intermediate_size": 128}
    make(tmp_path / "base", family, dtype=torch.float32, **sizes)
    adapt(load_whole(tmp_path / "base"), tmp_path / "adapter", 0.3)
    done = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "packed", quantize=format, verify=True)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    convert_checkpoint(tmp_path / "merged", tmp_path / "expected", "hub", quantize=format)
    assert same_bits(tensors_in(tmp_path / "packed"), tensors_in(tmp_path / "expected"))
    assert config_in(tmp_path / "packed") == config_in(tmp_path / "expected")
    packed, merged = (logits_of(load_whole(tmp_path / name, torch.bfloat16)) for name in ("packed", "merged"))
    assert relative_error(packed, merged) < largest
    assert done.roundings and all(layer.survived > 0.8 for layer in done.roundings)


@pytest.mark.pinned
@pytest.mark.parametrize("family, format", [("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8")])
def test_a_base_packed_for_training_is_merged_and_packed_for_engines(family, format, tmp_path):
    largest = {"mxfp4": 0.185, "fp8": 0.057}[format]
    sizes = {"intermediate_size": 32} if family == "gpt_oss" else {"hidden_size": 128, "moe_intermediate_size": 128}
    make(tmp_path / "base", family, **sizes)
    convert_checkpoint(tmp_path / "base", tmp_path / "packed", quantize=format)
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "hub", dequantize=True)
    adapt(load_whole(tmp_path / "dense"), tmp_path / "adapter", 0.3, [GATE_UP])
    merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged", "hub", quantize=format)
    merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "bf16", "hub")
    convert_checkpoint(tmp_path / "merged", tmp_path / "merged dense", "hub", dequantize=True)
    before, expected, after = (tensors_in(tmp_path / name) for name in ("dense", "bf16", "merged dense"))
    for name in expected:
        error = relative_error(after[name], expected[name])
        assert error < largest if "gate" in name or "up_proj" in name else error == 0, name
    assert sum(relative_error(before[name], expected[name]) > largest for name in expected) >= 2


@pytest.mark.pinned
def test_what_cannot_be_kept_is_refused_with_the_remedy(tmp_path):
    make(tmp_path / "base", "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    adapt(load_whole(tmp_path / "base", torch.bfloat16), tmp_path / "adapter", 0.1)
    convert_checkpoint(tmp_path / "base", tmp_path / "packed", quantize="fp8")
    for base, match, options in (
        ("base", "is not quantized, so there is no format to keep", {"quantize": "keep"}),
        ("base", "writes the base's own layout, 'hub'; leave", {"quantize": "keep", "layout": "native"}),
        ("base", "quantize='fp8' writes the hub's layout", {"quantize": "fp8", "layout": "native"}),
        ("base", "no layout for the experts of qwen3_moe in mxfp4, only for fp8", {"quantize": "mxfp4"}),
    ):
        with pytest.raises(CheckpointError, match=match):
            merge_adapter(tmp_path / base, tmp_path / "adapter", tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


@pytest.mark.pinned
def test_the_command_prints_what_rounding_did_to_each_layer(tmp_path, capsys):
    folders = base_and_adapter(tmp_path, "gpt_oss", "mxfp4", 1e-5)
    assert main(["merge", *map(str, folders), "--quantize", "keep", "--rounding", "nearest"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "adapter's change" in printed and "model.layers.1" in printed
    assert "warning: rounding to mxfp4 ate more than half" in printed


@pytest.mark.slow
@reads_peaks
def test_memory_is_that_of_a_shard_and_a_file_of_the_base(tmp_path):
    model = build("qwen3_moe", num_experts=128, hidden_size=256, moe_intermediate_size=256).bfloat16()
    model.save_pretrained(tmp_path / "bf16")
    adapt(model, tmp_path / "adapter", 0.01)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "base", "hub", quantize="fp8")
    folders = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    peak = peak_of_a_process(partial(merge_adapter, *folders, quantize="keep", max_shard_size="60MB"))
    written = bytes_in(tmp_path / "merged")
    assert written > 50e6 and peak < 2 * written + 45e6, "a shard and a file; modules and names take 20 MB here"
