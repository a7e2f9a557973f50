"""Checkpoints in FP8 and MXFP4 in vLLM: the weights that were meant, up to the rounding of bf16."""

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.checkpoints import load_whole
from helpers.vllm_engine import PROMPTS, complete, engine, logprobs_of, model_for_vllm
from peft import get_peft_model

import sonicmoe_hf
from sonicmoe_hf import RecordedRouting, convert_checkpoint, merge_adapter

pytestmark = pytest.mark.serving
FORMATS = {"fp8": "CPUExpertsFp8", "mxfp4": "CPUExpertsMxfp4"}


@pytest.fixture
def kernels_for_cpus(monkeypatch):
    """Have vLLM take its kernels for packed experts on CPUs without AMX."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for name in FORMATS.values():
        monkeypatch.setattr(getattr(cpu_moe, name), "_supports_current_device", staticmethod(lambda: True))


@pytest.fixture
def without_amx(kernels_for_cpus):
    """Skip where AVX-512 cannot do their products either."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's kernels for packed experts need AVX-512")


def replayed(model, completions):
    """Compute Transformers' log-probabilities of what vLLM chose, computed with the experts that it chose."""
    rows = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        routing = RecordedRouting.from_server([completion], torch.ones_like(ids))
        with torch.no_grad(), sonicmoe_hf.replay_routing(model, routing):
            rows.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1))
    return torch.cat(rows)


PACKED = [
    ("qwen3_moe", "fp8", {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128}),
    ("gpt_oss", "mxfp4", {"intermediate_size": 64}),
]
WITHOUT_LORA = {
    "fp8": "Unsupported FP8 MoE backend: NONE",
    "mxfp4": "backend: CPU, reason: kernel does not support LoRA",
}


@pytest.mark.parametrize("family, format, sizes", PACKED)
def test_vllms_kernels_for_cpus_take_no_adapters_of_packed_experts(family, format, sizes, kernels_for_cpus, tmp_path):
    """docs/rl.md says so of bases that GRPO has not been tried with: once they do, this fails."""
    model_for_vllm(family, tmp_path / "bf16", torch.bfloat16, **sizes)
    convert_checkpoint(tmp_path / "bf16", tmp_path / "packed", "hub", quantize=format)
    refused = pytest.raises((ValueError, NotImplementedError), match=WITHOUT_LORA[format])
    with refused, engine(tmp_path / "packed", dtype="bfloat16", enable_lora=True, max_loras=1, max_lora_rank=8):
        pass


@pytest.mark.parametrize("family, format, sizes", PACKED)
def test_packed_kept_and_merged_checkpoints_are_served_as_their_own_weights_in_bf16(
    family, format, sizes, without_amx, tmp_path
):
    """A base that `convert` packed, an adapter merged into it in its format, and one merged into bf16 and packed. The
    server's experts are replayed, because of two nearly equal ones bf16 takes either, which changes a log-probability by
    more than all of its rounding: without that the same weights in bf16 are as far off."""
    folders = {name: tmp_path / name for name in ("bf16", "packed", "dense", "adapter", "kept", "merged")}
    model_for_vllm(family, folders["bf16"], torch.bfloat16, **sizes)
    convert_checkpoint(folders["bf16"], folders["packed"], "hub", quantize=format)
    convert_checkpoint(folders["packed"], folders["dense"], "hub", dequantize=True)
    model = load_whole(folders["dense"])
    save_with_factors(get_peft_model(model, sonicmoe_hf.lora_config(model, r=2)), folders["adapter"], 0.1)
    merge_adapter(folders["packed"], folders["adapter"], folders["kept"], quantize="keep")
    merge_adapter(folders["bf16"], folders["adapter"], folders["merged"], quantize=format)
    for name in ("packed", "kept", "merged"):
        convert_checkpoint(folders[name], tmp_path / f"{name} dense", "hub", dequantize=True)
        expected = load_whole(tmp_path / f"{name} dense").eval()
        sonicmoe_hf.patch_model(expected)
        with engine(folders[name], dtype="bfloat16", enable_return_routed_experts=True) as llm:
            completions = complete(llm)
        difference = (logprobs_of(completions) - replayed(expected, completions)).abs()
        assert difference.mean() < 0.01 and difference.max() < 0.06, "bf16's 8 bits; its unpacked weights: 0.004, 0.03"
