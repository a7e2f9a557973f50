"""Every family's model with packed experts, saved by save_pretrained, loads again, and is
converted to the hub's names."""

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.checkpoints import packed_in, same_bits, tensors_in
from helpers.models import relative_error
from helpers.small_families import FOR_PACKING, families_here, slow_beyond_kinds, small_model
from peft import PeftModel, get_peft_model

from sonicmoe_hf import (
    CheckpointError,
    convert_checkpoint,
    from_pretrained,
    lora_config,
    merge_adapter,
    quantize_experts,
)

FORMATS = ("fp8", "mxfp4")
FP8_STEP = 0.08  # relative error of a matrix whose values are rounded up or down at random
RENAMED = ("deepseek_ocr2", "unlimited_ocr", "mistral_large4")  # their hub names' patterns fit on the model's own too
JOINED = ("ernie4_5_vl_moe",)  # the hub counts text's and images' experts in one list
HERE = families_here()
CASES = [(family, format) for family in RENAMED if family in HERE for format in FORMATS]
EVERYWHERE = len(CASES)
CASES += [(family, FORMATS[number % 2]) for number, family in enumerate(HERE) if family not in RENAMED]
PINNED = [  # 5.17 does not load qwen3_vl_moe's packed experts, and 5.24's inkling2 has no way back: both raise errors
    pytest.param(*case.values, marks=[*case.marks, pytest.mark.pinned])
    for case in slow_beyond_kinds(CASES[EVERYWHERE:])
]


@pytest.mark.parametrize("family, format", [*slow_beyond_kinds(CASES[:EVERYWHERE]), *PINNED])
def test_what_is_saved_packed_loads_again_to_the_bit_and_has_the_hubs_names_once_it_is_dense(family, format, tmp_path):
    model = quantize_experts(small_model(family, **FOR_PACKING), format)
    model.save_pretrained(tmp_path / "packed")
    again = from_pretrained(tmp_path / "packed", dtype=model.dtype, auto_class=type(model))
    assert packed_in(again).keys() == packed_in(model).keys() != set()
    assert same_bits(again.state_dict(), model.state_dict())
    again.dequantize().save_pretrained(tmp_path / "dense")
    if family in JOINED:
        with pytest.raises(CheckpointError, match=r"has no inverse .*dequantize\(\).save_pretrained"):
            convert_checkpoint(tmp_path / "packed", tmp_path / "hub", "hub")
        return
    convert_checkpoint(tmp_path / "packed", tmp_path / "hub", "hub")
    assert same_bits(tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "dense"))


@pytest.mark.pinned
@pytest.mark.parametrize("family", ["aria", "openai_privacy_filter"])
def test_experts_that_are_transposed_in_the_model_and_not_where_packed_are_merged(family, tmp_path):
    model = quantize_experts(small_model(family, **FOR_PACKING), "fp8")
    model.save_pretrained(tmp_path / "packed")
    save_with_factors(get_peft_model(model, lora_config(model, r=2)), tmp_path / "adapter")
    model = from_pretrained(tmp_path / "packed", dtype=torch.float32, auto_class=type(model)).dequantize()
    PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "by peft")
    merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged")
    merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "kept", quantize="keep")
    convert_checkpoint(tmp_path / "kept", tmp_path / "kept, dense", "hub")
    expected = tensors_in(tmp_path / "by peft")
    for folder, tolerance in (("merged", 1e-5), ("kept, dense", FP8_STEP)):
        found = tensors_in(tmp_path / folder)
        assert found.keys() == expected.keys()
        assert max(relative_error(found[name], expected[name]) for name in expected) < tolerance
