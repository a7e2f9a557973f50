"""Models loaded with CompressedTensorsConfig(dequantize=True), whose package comes with vLLM, and trained whole: what
is saved is plain, and loads back bit for bit."""

import pytest
import torch
from helpers.checkpoints import make
from helpers.integers import to_integers
from helpers.resuming import assert_equal, weights
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import sonicmoe_hf

pytestmark = pytest.mark.serving
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, sonicmoe_hf.from_pretrained])
def test_a_model_of_compressed_tensors_is_saved_as_a_plain_checkpoint(load, tmp_path):
    make(tmp_path / "quantized", "qwen3_moe", **SIZES)
    to_integers(tmp_path / "quantized", "ct-32")
    model = load(tmp_path / "quantized", quantization_config=CompressedTensorsConfig(dequantize=True)).float()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    # bf16: the values of the integers are rounded to it
    torch.testing.assert_close(model.state_dict(), dense.state_dict(), rtol=2**-8, atol=0)
    sonicmoe_hf.patch_model(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)  # as training does
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_equal(weights(loaded), weights(model))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_what_convert_writes_is_read_by_compressed_tensors_with_our_values(family, tmp_path):
    make(tmp_path / "bf16", family, **SIZES)
    sonicmoe_hf.convert_checkpoint(tmp_path / "bf16", tmp_path / "hub", "hub", quantize="int4")
    sonicmoe_hf.convert_checkpoint(tmp_path / "hub", tmp_path / "ours", "hub", dequantize=True)
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16, **options)
        for name, options in (
            ("hub", {"quantization_config": CompressedTensorsConfig(dequantize=True)}),
            ("ours", {}),
        )
    )
    assert_equal(weights(theirs), weights(ours))
