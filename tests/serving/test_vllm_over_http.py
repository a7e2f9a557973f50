"""`vllm serve` with what `convert` printed: base and adapters by name, and what `check` says of them."""

import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.checkpoints import edit_tensors
from helpers.engine_adapters import config_for_vllm
from helpers.http_servers import answer, running
from helpers.trl_trainers import word_tokenizer
from helpers.vllm_engine import PROMPTS, TOKENS, model_for_vllm
from peft import get_peft_model

from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.serving
WORD = "<{}>"
SMALL = [
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "8",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--host",
    "127.0.0.1",
]


def zeroed_experts(tensors):
    return {name: 0 * tensor if ".experts." in name else tensor for name, tensor in tensors.items()}


def chosen(port, name, prompt):
    """Get the log-probabilities of the tokens that the server completes the prompt with, and those tokens."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    choice = answer(port, "/v1/completions", {"model": name, "ignore_eos": True, **body})["choices"][0]
    return torch.tensor(choice["logprobs"]["token_logprobs"]), choice["token_ids"]


@torch.no_grad()
def expected(model, prompt, ids):
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_base_and_adapters_answer_by_name_and_check_tells_them_apart(tmp_path, capsys):
    """One adapter is as `convert` writes it, one ("partly") without its experts, as engines have served adapters in
    silence."""
    base, adapter, tuned, partly = (tmp_path / name for name in ("base", "adapter", "tuned", "partly"))
    model = model_for_vllm("qwen3_moe", base, max_position_embeddings=256)
    word_tokenizer(WORD).save_pretrained(base)
    adapted = save_with_factors(get_peft_model(model, config_for_vllm(model)), adapter, 0.1)
    assert main(["convert", str(adapter), str(tuned), "--layout", "vllm", "--trained-on", str(base)]) == 0
    flags = re.search(r"vllm serve BASE (--enable-lora .*) NAME=ADAPTER", capsys.readouterr().out)[1].split()
    shutil.copytree(tuned, partly)
    edit_tensors(partly, lambda tensors: tensors.update(zeroed_experts(tensors)))
    named = [f"{folder.name}={folder}" for folder in (tuned, partly)]
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
    vllm = [str(Path(sys.executable).with_name("vllm")), "serve", str(base), "--served-model-name", "base"]
    with running([*vllm, *flags, *named, *SMALL, "--port"], tmp_path / "log", environment) as port:
        for prompt in PROMPTS:
            values, ids = chosen(port, "tuned", prompt)
            assert (values - expected(adapted, prompt, ids)).abs().max() < 1e-4, "fp32: two engines' order of sums"
            values, ids = chosen(port, "base", prompt)
            with adapted.disable_adapter():
                assert (values - expected(adapted, prompt, ids)).abs().max() < 1e-4
        words = random.Random(0)
        (tmp_path / "text").write_text(" ".join(WORD.format(words.randint(4, 63)) for _ in range(380)))
        verdicts = {}
        for name in ("tuned", "partly"):
            command = ["check", base, adapter, "--server", f"http://127.0.0.1:{port}", "--model", name]
            main([*map(str, command), "--text", str(tmp_path / "text"), "--json"])
            places = json.loads(capsys.readouterr().out)["places"]
            verdicts |= {(name, place["is_base"]): place["kind"] for place in places}
    assert verdicts == {
        ("tuned", True): "not applied",
        ("tuned", False): "applied",
        ("partly", True): "not applied",
        ("partly", False): "applied in part",
    }
