"""Inputs that programs of others train on in a moment: a model in a folder, with its tokenizer, and datasets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sonicmoe_hf.tools.demo.corpus import train_tokenizer

from .examples import TEXT

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def run_python(code, **environment):
    """Run this code of ours in a process of its own, which finds the package and the tests; an
    error there is one here."""
    tests = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(map(str, (tests.parent, tests)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_model(folder, dtype=torch.float32, **sizes):
    """Save a model with weights as large as trained ones, and the tokenizer. Returns the model."""
    tokenizer = train_tokenizer([TEXT], SIZES["vocab_size"])
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(**{**SIZES, **ids, **sizes}, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def texts():
    """Make 32 short texts."""
    words = TEXT.split()
    return [" ".join(words[i % 7 :] + words[: i % 5]) for i in range(32)]


def write_rows(folder, rows):
    """Write a dataset that load_dataset takes."""
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
