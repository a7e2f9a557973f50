"""sonicmoe_hf.from_pretrained chooses attention with sinks by itself, and doctor says where it does."""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from helpers.attention import build
from helpers.models import build as build_family
from helpers.small_families import small_model
from transformers import AutoConfig

import sonicmoe_hf
from sonicmoe_hf.attention import models
from sonicmoe_hf.attention.names import TORCH_SINKS
from sonicmoe_hf.tools.cli.doctor import examine
from sonicmoe_hf.tools.cli.linear_attention import describe_linear_attention
from sonicmoe_hf.tools.random_models import random_model, random_packed_model

HALF = {"dtype": torch.bfloat16}


@pytest.fixture
def on_a_gpu(monkeypatch):
    if importlib.util.find_spec("bitsandbytes"):  # which loading a model imports, and which then looks for a real GPU
        importlib.import_module("bitsandbytes")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt_oss")
    build(dtype=torch.bfloat16).save_pretrained(path)
    return path


def attention(folder, **options):
    return sonicmoe_hf.from_pretrained(folder, **{**HALF, **options}).config._attn_implementation


@pytest.mark.parametrize(
    ("capability", "options", "taken"),
    [
        ((9, 0), {}, TORCH_SINKS),
        ((8, 0), {}, TORCH_SINKS),
        ((8, 0), {"dtype": torch.float16}, TORCH_SINKS),
        ((8, 0), {"dtype": torch.float64}, "eager"),
        ((9, 0), {"dtype": torch.float32}, "eager"),
        ((9, 0), {"attn_implementation": "eager"}, "eager"),
        ((7, 5), {}, "eager"),
        (None, {}, "eager"),
    ],
)
def test_models_with_sinks_get_them_on_gpus_since_the_a100_in_16_bits(
    folder, on_a_gpu, monkeypatch, capability, options, taken
):
    """Unless the caller asks for another attention."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert attention(folder, **options) == taken


def test_models_with_random_weights_get_them_too(folder, on_a_gpu, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert random_model(str(folder), **HALF).config._attn_implementation == TORCH_SINKS
    config = AutoConfig.from_pretrained(folder)
    for given, taken in ((None, TORCH_SINKS), ("eager", "eager")):
        model = random_packed_model(config, None, device="cpu", attn_implementation=given, **HALF)
        assert model.config._attn_implementation == taken


def test_a_model_with_attention_dropout_stays_eager(tmp_path, on_a_gpu):
    build(dtype=torch.bfloat16, attention_dropout=0.1).save_pretrained(tmp_path)
    assert attention(tmp_path) == "eager"


def test_other_models_keep_sdpa(tmp_path, on_a_gpu):
    build_family("qwen3_moe").to(torch.bfloat16).save_pretrained(tmp_path)
    assert attention(tmp_path) == "sdpa"


def test_doctor_says_which_attention_and_warns_of_flash_attention_without_sinks(folder, on_a_gpu):
    taken, warning = examine(str(folder))["attention"]
    assert f'takes attn_implementation="{TORCH_SINKS}"' in taken
    assert warning.startswith("warning") and "leave them out without an error" in warning


def test_doctor_says_why_attention_stays_eager(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert 'leaves attn_implementation="eager", as there is no NVIDIA GPU here' in examine(str(folder))["attention"][0]


def test_doctor_says_nothing_of_models_without_sinks(tmp_path):
    build_family("qwen3_moe").save_pretrained(tmp_path)
    assert examine(str(tmp_path))["attention"] == []


@pytest.mark.parametrize("model_type", models.PIECES_WITH_SINKS)
def test_of_models_that_choose_keys_the_reason_is_said(model_type):
    config = SimpleNamespace(model_type=model_type, get_text_config=lambda: config)
    (sentence,) = models.describe_attention(SimpleNamespace(config=config))
    assert models.PIECES_WITH_SINKS[model_type] in sentence


@pytest.mark.pinned
@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="its kernels are taken")
def test_doctor_names_the_packages_of_linear_attention_s_kernels():
    (sentence,) = describe_linear_attention(small_model("kimi_linear"))
    assert "pip install" in sentence and "flash-linear-attention" in sentence
    assert describe_linear_attention(small_model("qwen3_moe")) == []
