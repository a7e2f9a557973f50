import os

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import vllm_stand_in
from helpers.trl_trainers import model_of, sentence_tokenizer


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Save a small Qwen3-MoE with its tokenizer, which trainer and engine read; NF4 packs 64 values together."""
    folder = tmp_path_factory.mktemp("base")
    words = sentence_tokenizer()
    model_of(words, hidden_size=64, moe_intermediate_size=64).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture
def engine(monkeypatch):
    """Put the stand-in where vLLM would be."""
    vllm_stand_in.install(monkeypatch)
    return vllm_stand_in.StandInLLM


@pytest.fixture(autouse=True)
def environment_afterwards_as_before():
    """Take back what TRL sets for vLLM in its process, RANK and its kin, by which later Trainers would be distributed."""
    before = dict(os.environ)
    yield
    changed = {name for name, value in os.environ.items() if before.get(name) != value} - {"PYTEST_CURRENT_TEST"}
    for name in changed:
        os.environ.pop(name)
    os.environ.update({name: before[name] for name in changed if name in before})
    if "RANK" in changed:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(True)
