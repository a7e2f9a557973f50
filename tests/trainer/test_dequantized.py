"""Models loaded with dequantize=True and trained whole: what is saved is plain, and loads back bit for bit."""

import pytest
import torch
import transformers
from helpers.checkpoints import config_in, edit_config, in_fp8, make, rewrite, tensors_in
from helpers.marks import rest_pinned
from helpers.models import build
from helpers.resuming import BEST, Snapshots, assert_equal, rounding, train_and_save, weights
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config, Mxfp4Config

import sonicmoe_hf
from sonicmoe_hf import convert_checkpoint
from sonicmoe_hf.errors import CheckpointError
from sonicmoe_hf.trainer.resume import restore

BLOCK = (8, 8)  # divides every matrix: Transformers dequantizes no blocks that are cut off
QUANTIZED = {"gpt_oss": "mxfp4", "qwen3_moe": "fp8", "deepseek_v3": "fp8"}
KIMI = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


def quantized(family, folder):
    make(folder, family, QUANTIZED[family], fp8_block=BLOCK)
    return folder


def dequantized(folder, load=AutoModelForCausalLM.from_pretrained):
    method = config_in(folder)["quantization_config"]["quant_method"]
    config = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}[method](dequantize=True)
    return load(folder, quantization_config=config).float()  # FP8's norms stay in bf16 whatever dtype is asked for


def assert_saved_whole(model, folder, auto_class=AutoModelForCausalLM):
    """Change every weight, as training does, save, and compare with what Transformers loads."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)
    model.save_pretrained(folder)
    loaded, info = auto_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_equal(weights(loaded), weights(model))
    assert "quantization_config" not in (folder / "config.json").read_text()


@pytest.mark.parametrize("family", QUANTIZED)
def test_a_dequantized_model_is_saved_as_a_plain_checkpoint(family, tmp_path):
    folder = quantized(family, tmp_path / "quantized")
    assert_saved_whole(dequantized(folder, sonicmoe_hf.from_pretrained), tmp_path / "ours")
    theirs = dequantized(folder)
    sonicmoe_hf.patch_model(theirs)
    assert_saved_whole(theirs, tmp_path / "patched")


@pytest.mark.skipif(not hasattr(transformers, "Kimi_K25Config"), reason="Transformers has no Kimi K2.5 yet")
def test_a_model_whose_inner_config_declares_the_quantization_is_saved_as_a_plain_checkpoint(tmp_path):
    vision = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    config = transformers.Kimi_K25Config(
        text_config=transformers.DeepseekV3Config(**KIMI).to_dict(), vision_config={**vision, "patch_size": 14},
        projection_hidden_size=64, image_token_id=120, video_token_id=121, vision_start_token_id=122,
        tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "fp8")
    tensors = tensors_in(tmp_path / "fp8")
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    rewrite(tmp_path / "fp8", {**tensors, **in_fp8(experts, size=BLOCK)[0]})
    declared = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
    edit_config(
        tmp_path / "fp8", text_config={**config_in(tmp_path / "fp8")["text_config"], "quantization_config": declared}
    )
    model = sonicmoe_hf.from_pretrained(
        tmp_path / "fp8", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    assert_saved_whole(model, tmp_path / "saved", AutoModelForImageTextToText)


@pytest.mark.parametrize("attach", rest_pinned([True, False]))
@pytest.mark.parametrize("family", rest_pinned(["gpt_oss", "qwen3_moe"]))
def test_a_dequantized_model_resumes_and_finds_its_best(family, attach, tmp_path):
    folder = quantized(family, tmp_path / "quantized")
    callbacks = (lambda: [rounding()]) if attach else (lambda: [])
    load = AutoModelForCausalLM.from_pretrained if attach else sonicmoe_hf.from_pretrained
    snapshots = Snapshots()
    best = train_and_save(
        dequantized(folder, load), tmp_path / "straight", callbacks=[snapshots, *callbacks()], **BEST
    )
    assert_equal(weights(best.model), snapshots.at[2])
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    resumed = train_and_save(dequantized(folder, load), tmp_path / "resumed", checkpoint, callbacks=callbacks())
    assert_equal(weights(resumed.model), snapshots.at[4])


@pytest.mark.pinned  # Transformers 5.24 writes no such files
def test_files_that_hold_plain_weights_under_packed_names_are_refused_with_a_remedy_that_works(tmp_path):
    model = dequantized(quantized("gpt_oss", tmp_path / "quantized"))
    model.save_pretrained(tmp_path / "written")  # as without sonicmoe_hf
    for read in (sonicmoe_hf.from_pretrained, lambda source: convert_checkpoint(source, tmp_path / "native")):
        with pytest.raises(CheckpointError, match=r"_proj_blocks and others .*rename them: ") as refused:
            read(tmp_path / "written")
    places = {"SRC": tmp_path / "written", "DST": tmp_path / "renamed", "AutoModelForCausalLM": AutoModelForCausalLM}
    with pytest.raises(CheckpointError, match="_proj_blocks and others"):
        restore(build("gpt_oss", intermediate_size=32), tmp_path / "written")
    exec(str(refused.value).partition("rename them: ")[2], places)
    renamed = sonicmoe_hf.from_pretrained(tmp_path / "renamed", dtype=torch.float32)
    assert_equal(weights(renamed), weights(model))
