import pytest
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
