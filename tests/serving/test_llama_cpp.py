"""llama.cpp's converters take what we write. LLAMA_CPP names a folder with them: a clone, or the sdist of
llama-cpp-python, which has them in vendor/llama.cpp."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.engine_adapters import config_for_vllm
from helpers.models import build
from helpers.trl_trainers import word_tokenizer
from peft import get_peft_model

from sonicmoe_hf import convert_adapter, merge_adapter

LLAMA_CPP = Path(os.environ.get("LLAMA_CPP", "/no folder"))
HAS_CONVERTERS = (LLAMA_CPP / "convert_lora_to_gguf.py").exists()
pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(not HAS_CONVERTERS, reason="LLAMA_CPP names no folder with llama.cpp's converters"),
]

# the tokenizer's kind is told by a hash of released ones
CONVERT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
TextModel.set_vocab = lambda self: self._set_vocab_none()
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def converted(script, source, *options):
    """Run a converter; return the tensors of the GGUF file, or what it says where it fails."""
    target = source.with_suffix(".gguf")
    command = [sys.executable, "-c", CONVERT, LLAMA_CPP, LLAMA_CPP / script, source, "--outtype", "f32", *options]
    done = subprocess.run([*map(str, command), "--outfile", str(target)], capture_output=True, text=True, timeout=240)
    if done.returncode:
        return done.stderr
    sys.path.append(str(LLAMA_CPP / "gguf-py"))
    from gguf import GGUFReader

    tensors = GGUFReader(target).tensors
    return {each.name: torch.tensor(each.data).view(*reversed(each.shape.tolist())) for each in tensors}


def test_merged_models_and_adapters_with_a_pair_for_each_expert_are_converted_and_pefts_form_is_not(tmp_path):
    model = build("qwen3_moe").eval()
    model.save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    adapted = save_with_factors(get_peft_model(model, config_for_vllm(model)), tmp_path / "adapter", 0.1)
    convert_adapter(tmp_path / "adapter", tmp_path / "split", "vllm", trained_on=tmp_path / "base")
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    base, merged = (converted("convert_hf_to_gguf.py", tmp_path / name) for name in ("base", "merged"))
    split, own = (
        converted("convert_lora_to_gguf.py", tmp_path / name, "--base", str(tmp_path / "base"))
        for name in ("split", "adapter")
    )
    assert "Unprocessed experts" in own
    experts = adapted.merge_and_unload().model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    for name, weight in {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": experts.down_proj}.items():
        name = f"blk.1.{name}.weight"
        torch.testing.assert_close(merged[name], weight.detach())
        a, b = split[f"{name}.lora_a"], split[f"{name}.lora_b"]
        torch.testing.assert_close(base[name] + 2 * b @ a, weight.detach())  # lora_alpha is 2 r
