"""Every family's model with packed experts, saved by save_pretrained, loads again, and is converted to the hub's names."""

import pytest
from helpers.checkpoints import packed_in, same_bits, tensors_in
from helpers.marks import rest_pinned
from helpers.small_families import FOR_PACKING, families_here, small_model

from sonicmoe_hf import CheckpointError, convert_checkpoint, from_pretrained, quantize_experts

FORMATS = ("fp8", "mxfp4")
RENAMED = ("deepseek_ocr2", "unlimited_ocr", "mistral_large4")  # their hub names' patterns fit on the model's own too
JOINED = ("ernie4_5_vl_moe",)  # the hub counts text's and images' experts in one list
HERE = families_here()
CASES = [(family, format) for family in RENAMED if family in HERE for format in FORMATS]
CASES += [(family, FORMATS[number % 2]) for number, family in enumerate(HERE) if family not in RENAMED]


@pytest.mark.parametrize("family, format", rest_pinned(CASES, 4))
def test_what_is_saved_packed_loads_again_to_the_bit_and_has_the_hubs_names_once_it_is_dense(family, format, tmp_path):
    model = quantize_experts(small_model(family, **FOR_PACKING), format)
    model.save_pretrained(tmp_path / "packed")
    again = from_pretrained(tmp_path / "packed", dtype=model.dtype, auto_class=type(model))
    assert packed_in(again).keys() == packed_in(model).keys() != set()
    assert same_bits(again.state_dict(), model.state_dict())
    again.dequantize().save_pretrained(tmp_path / "dense")
    if family in JOINED:
        with pytest.raises(CheckpointError, match=r"one layer at a time .*dequantize\(\).save_pretrained"):
            convert_checkpoint(tmp_path / "packed", tmp_path / "hub", "hub")
        return
    convert_checkpoint(tmp_path / "packed", tmp_path / "hub", "hub")
    assert same_bits(tensors_in(tmp_path / "hub"), tensors_in(tmp_path / "dense"))
