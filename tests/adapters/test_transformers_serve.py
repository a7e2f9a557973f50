"""`transformers serve`, its experts patched, answers over HTTP with what a merged checkpoint generates without."""

import json
import os
import sys
from importlib.util import find_spec

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import edit_tensors, make
from helpers.http_servers import answer, running
from helpers.trl_trainers import word_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from sonicmoe_hf import merge_adapter
from sonicmoe_hf.tools.autopatch.program import _environment
from sonicmoe_hf.tools.autopatch.settings import RunSettings
from sonicmoe_hf.tools.cli.main import main

pytestmark = pytest.mark.slow
if not all(map(find_spec, ("fastapi", "uvicorn", "openai"))):
    pytest.skip("transformers serve needs them: pip install 'transformers[serving]'", allow_module_level=True)

SERVE = """  # transformers serve, which prints whether the model that it loaded is patched
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import app
load = ModelManager._load_model
def load_and_tell(*arguments, **options):
    model = load(*arguments, **options)
    import sonicmoe_hf
    print("patched:", sonicmoe_hf.is_patched(model), flush=True)
    return model
ModelManager._load_model = load_and_tell
app()
"""
WORD, TOKENS = "<{}>", 12
PROMPT = "<5> <9> <33> <7>"
WHOLE_BLOCKS = {"hidden_size": 128, "moe_intermediate_size": 128}


def served(log):
    """Start a server of the models that it is asked for, which `sonicmoe-hf run` gives way to."""
    script = log.with_name("serve.py")
    script.write_text(SERVE)
    arguments = ["serve", "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32", "--port"]
    environment = _environment(RunSettings(), {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})
    return running([sys.executable, str(script), *arguments], log, environment)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write the hub's checkpoint with a tokenizer, and the same with an adapter merged: in fp32, and its experts in
    FP8."""
    folder = tmp_path_factory.mktemp("served")
    make(folder / "base", "qwen3_moe", dtype=torch.float32, **WHOLE_BLOCKS)
    # never the likeliest: padding, the end and the unknown word, which answers lack, so that check gets enough tokens
    edit_tensors(folder / "base", lambda tensors: tensors["lm_head.weight"][:4].zero_())
    word_tokenizer(WORD).save_pretrained(folder / "base")
    adapt(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter", target_modules=["o_proj"])
    merge_adapter(folder / "base", folder / "adapter", folder / "merged")
    merge_adapter(folder / "base", folder / "adapter", folder / "fp8", quantize="fp8")
    return folder


def generated(folder):
    """Generate greedily with Transformers here."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(inputs["input_ids"], max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_server_answers_with_what_the_merged_model_generates(folders, tmp_path, capsys):
    log, replies = tmp_path / "log", {}
    with served(log) as port:
        for name in ("merged", "fp8"):
            body = {"model": str(folders / name), "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            replies[name] = answer(port, "/v1/completions", body)
        text = tmp_path / "text"
        text.write_text(" ".join(WORD.format(4 + 7 * i % 60) for i in range(400)))
        server = ["--server", f"http://127.0.0.1:{port}", "--text", str(text)]
        for name, kind in (("merged", "applied"), ("base", "not applied")):
            command = [
                "check",
                *(str(folders / each) for each in ("base", "adapter")),
                *server,
                "--model",
                str(folders / name),
            ]
            assert main([*command, "--json"]) == (name == "base")
            assert json.loads(capsys.readouterr().out)["places"][0]["kind"] == kind
    for name, reply in replies.items():
        expected = generated(folders / name)
        assert len(expected.split()) > 4 and reply["choices"][0]["text"].split() == expected.split()
        assert expected != generated(folders / "base"), "the adapter does something"
    assert log.read_text().count("patched: True") == len(replies) + 1  # the base
