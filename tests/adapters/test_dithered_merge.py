"""Adapters whose changes are far below the steps of a packed base, merged by dithered rounding:
in files and in memory."""

from functools import partial

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.checkpoints import (
    config_in,
    edit_tensors,
    load_whole,
    make,
    packed_in,
    same_bits,
    tensors_in,
    to_nvfp4,
)
from helpers.marks import crossed
from helpers.models import logits_of
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, convert_adapter, convert_checkpoint, merge_adapter
from sonicmoe_hf.checkpoints.writing.rounding_effects import SERVE_UNROUNDED, TO_NEAREST
from sonicmoe_hf.errors import UnsupportedModelError
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.tools.checking.places import remedy_of_rounding

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}  # blocks of 128 are whole
OF_GPT_OSS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZE = 1e-4  # of B A, whose factors are normal: a hundredth of weights' deviation of 0.02
QUANTIZED = {"mxfp4": ("gpt_oss", OF_GPT_OSS), "fp8": ("qwen3_moe", SIZES), "nvfp4": ("qwen3_moe", SIZES)}
IN_MEMORY = [("qwen3_moe", SIZES, name) for name in FORMATS] + [("gpt_oss", OF_GPT_OSS, "mxfp4")]


def adapter_on(model, folder, size=SIZE, parameters=(GATE_UP, DOWN)):
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["o_proj"], target_parameters=list(parameters))
    return save_with_factors(get_peft_model(model, config), folder, size**0.5)


def hub_base(folder, name):
    """Write a hub's checkpoint in the format, and an adapter of it."""
    family, sizes = QUANTIZED[name]
    make(folder / "bf16", family, **sizes)
    if name == "nvfp4":
        make(folder / "base", family, **sizes)
        to_nvfp4(folder / "base")
    else:
        convert_checkpoint(folder / "bf16", folder / "base", "hub", quantize=name)
    adapter_on(load_whole(folder / "bf16"), folder / "adapter")
    return folder / "base", folder / "adapter"


def packed_base(folder, family, sizes, name, layout):
    """Write a checkpoint that was packed here in either layout, and an adapter of it."""
    make(folder / "bf16", family, **sizes)
    if layout == "native":
        convert_checkpoint(folder / "bf16", folder / "base", quantize=name)
    else:
        sonicmoe_hf.from_pretrained(folder / "bf16", experts_quantization=name).save_pretrained(folder / "base")
    adapter_on(load_whole(folder / "bf16"), folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.mark.pinned
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_an_adapter_learned_is_in_the_merged_file(name, tmp_path):
    merge = partial(merge_adapter, *hub_base(tmp_path, name), quantize="keep")
    done, lost = merge(tmp_path / "dithered"), merge(tmp_path / "nearest", rounding="nearest")
    assert all(0.85 < layer.survived < 1.15 for layer in done.roundings), "noise of 10^5 values of 50 times the change"
    assert all(layer.worst <= layer.median and layer.worst <= layer.survived for layer in done.roundings)
    assert all(layer.survived < (0.5 if name == "fp8" else 0.05) for layer in lost.roundings)
    of_changes = next(notice for notice in done.notices if "of the adapter's change of a matrix" in notice)
    assert f"is left by dithered rounding to {name} in the median" in of_changes and "in the worst, " in of_changes
    assert not any("warning" in notice for notice in done.notices)
    (warning,) = (notice for notice in lost.notices if "warning" in notice)
    assert warning.endswith("layers: " + TO_NEAREST) and "merge it by --rounding dithered, or" in TO_NEAREST
    remedies = [
        remedy_of_rounding(tmp_path / base, tmp_path / merged)
        for base, merged in (("base", "nearest"), ("base", "dithered"), ("bf16", "nearest"))
    ]
    assert remedies == [TO_NEAREST, SERVE_UNROUNDED, SERVE_UNROUNDED], "what check says of them"


@pytest.mark.pinned
@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_the_result_is_a_function_of_base_adapter_and_seed(name, tmp_path):
    merge = partial(merge_adapter, *hub_base(tmp_path, name), quantize="keep")
    merge(tmp_path / "whole")
    done = merge(tmp_path / "shards", max_shard_size="50KB")
    merge(tmp_path / "other", seed=1)
    whole, shards, other = (tensors_in(tmp_path / folder) for folder in ("whole", "shards", "other"))
    assert done.shards > 3 and same_bits(whole, shards) and not same_bits(whole, other)


@pytest.mark.pinned
def test_experts_that_nothing_changed_keep_their_bits_and_their_minus_zeros(tmp_path):
    base, adapter = hub_base(tmp_path, "mxfp4")
    blocks = f"model.layers.0.{GATE_UP}_blocks"

    def minus_zeros(tensors):
        tensors[blocks][:, :4] = 0x88

    edit_tensors(base, minus_zeros)
    factor = f"base_model.model.model.layers.0.{GATE_UP.rpartition('.')[0]}.base_layer.lora_B.weight"
    stored = tensors_in(adapter)
    factor = next(
        key for key in stored if "layers.0.mlp.experts" in key and "lora_B" in key and len(stored[key]) == 128
    )
    b = stored[factor].unflatten(1, (2, -1)).clone()
    b[..., 0] = 0.0  # of expert 0
    b[6:] = 0.0  # rows of the others
    edit_tensors(adapter, {factor: b.flatten(1)})
    for rounding in ("dithered", "nearest"):
        merge_adapter(base, adapter, tmp_path / rounding, quantize="keep", rounding=rounding)
        before, after = tensors_in(base)[blocks], tensors_in(tmp_path / rounding)[blocks]
        assert torch.equal(before[0], after[0]) and torch.equal(before[:, 6:], after[:, 6:])
        scales = blocks.replace("_blocks", "_scales")
        assert torch.equal(tensors_in(base)[scales][0], tensors_in(tmp_path / rounding)[scales][0])
    assert not torch.equal(before[1:, :6], tensors_in(tmp_path / "dithered")[blocks][1:, :6])


@pytest.mark.pinned
@pytest.mark.parametrize("family, sizes, name", [("qwen3_moe", SIZES, "fp8"), ("gpt_oss", OF_GPT_OSS, "mxfp4")])
def test_one_base_in_two_layouts_is_merged_to_the_same_values(family, sizes, name, tmp_path):
    """The native layout's rows are interleaved, and Qwen's files have a matrix for each projection."""
    base, adapter = packed_base(tmp_path, family, sizes, name, "native")
    convert_checkpoint(base, tmp_path / "hub", "hub", quantize=name)
    merge_adapter(base, adapter, tmp_path / "native merged", quantize="keep")
    merge_adapter(tmp_path / "hub", adapter, tmp_path / "hub merged", quantize="keep")
    merge_adapter(base, adapter, tmp_path / "for engines", quantize=name)
    convert_checkpoint(tmp_path / "native merged", tmp_path / "moved", "hub", quantize=name)
    merged = tensors_in(tmp_path / "hub merged")
    assert same_bits(tensors_in(tmp_path / "moved"), merged)
    assert same_bits(tensors_in(tmp_path / "for engines"), merged), "packed for engines, from the same blocks"
    assert not same_bits(tensors_in(tmp_path / "hub"), merged)


@pytest.mark.parametrize("base, layout", crossed(IN_MEMORY, ["native", "hub"], everywhere=2))
def test_a_base_that_was_packed_here_keeps_its_format_in_files_and_in_memory(base, layout, tmp_path):
    family, sizes, name = base
    base, adapter = packed_base(tmp_path, family, sizes, name, layout)
    done = merge_adapter(base, adapter, tmp_path / "merged", quantize="keep", verify=True)
    assert all(0.85 < each.survived < 1.15 for each in done.roundings)
    assert any("sonicmoe-hf merge ORIGINAL ADAPTER DST" in notice for notice in done.notices)
    assert config_in(tmp_path / "merged") == config_in(base)
    loaded = sonicmoe_hf.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    whole = packed_in(loaded)
    assert len(whole) == 4
    if layout == "native":
        adapter = convert_adapter(adapter, tmp_path / "native adapter", "native")
    peft = PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(base, dtype=torch.float32), adapter)
    assert len(packed_in(peft)) == 4
    merged = peft.merge_and_unload()
    for weight, same in zip(packed_in(merged).values(), whole.values(), strict=True):
        assert torch.equal(weight.codes, same.codes) and torch.equal(weight.scales, same.scales)
    for name, own in loaded.named_parameters():
        if "o_proj.weight" in name:  # whose sum is bf16 in the file, and fp32 in memory
            sum_ = merged.get_parameter(name)
            torch.testing.assert_close(sum_, own, rtol=2**-8, atol=0)
            sum_.data.copy_(own)
    torch.testing.assert_close(logits_of(merged), logits_of(loaded), rtol=0, atol=1e-5)


def test_a_merged_adapter_stays_and_one_that_is_not_finite_changes_nothing(tmp_path):
    base, adapter = packed_base(tmp_path, "qwen3_moe", SIZES, "nf4", "hub")
    peft = PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(base, dtype=torch.float32), adapter)
    before = {name: weight.codes.clone() for name, weight in packed_in(peft).items()}
    wrapper = next(module for module in peft.modules() if type(module).__name__ == "ParamWrapper")
    with pytest.raises(UnsupportedModelError, match="merged by their model"):
        wrapper.merge()
    factor = wrapper.lora_B["default"].weight
    kept = factor.detach().clone()
    factor.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinite values"):
        peft.merge_adapter()
    assert not wrapper.merged
    factor.data.copy_(kept)
    peft.merge_adapter()
    after = packed_in(peft)
    assert all(not torch.equal(codes, after[name].codes) for name, codes in before.items())
    for undo in (peft.unmerge_adapter, partial(logits_of_base, peft)):
        with pytest.raises(UnsupportedModelError, match="cannot be taken out again"):
            undo()


@pytest.mark.pinned
def test_wrappers_of_layers_change_no_code_of_a_merge_in_memory(tmp_path):
    base, adapter = packed_base(tmp_path, "qwen3_moe", SIZES, "nf4", "hub")
    plain, wrapped = (PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(base), adapter) for _ in range(2))
    layers = wrapped.get_base_model().model.layers
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), torch.compile(layers[1])
    for model in (plain, wrapped):
        model.merge_adapter()
    for weight, same in zip(packed_in(wrapped).values(), packed_in(plain).values(), strict=True):
        assert torch.equal(weight.codes, same.codes) and torch.equal(weight.scales, same.scales)


def logits_of_base(peft):
    with peft.disable_adapter():
        return logits_of(peft)


@pytest.mark.pinned
def test_an_unknown_rounding_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rounding is 'up'; choose one of 'dithered', 'nearest'"):
        merge_adapter(tmp_path, tmp_path, tmp_path / "out", rounding="up")
    base, adapter = packed_base(tmp_path, "qwen3_moe", SIZES, "fp8", "native")
    with pytest.raises(CheckpointError, match="writes the base's own layout, 'native'; leave layout out"):
        merge_adapter(base, adapter, tmp_path / "out", "hub", quantize="keep")
