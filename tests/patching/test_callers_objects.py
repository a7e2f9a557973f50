"""Objects that a caller hands over or has set stay as they are, and say which model is loaded."""

import copy
import json
import threading
import warnings
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import config_in, make, to_fp8
from helpers.marks import loads_matrices
from helpers.models import batch, build
from peft import get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3_5MoeConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3OmniMoeConfig,
)
from transformers.utils import logging

from sonicmoe_hf import from_pretrained, lora_config, patch_model
from sonicmoe_hf.checkpoints.reading import config_only
from sonicmoe_hf.formats.declared import declared_quantization
from sonicmoe_hf.models.loading import _auto_class
from sonicmoe_hf.patching.loading_packed import with_packed_experts

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}


@pytest.fixture
def in_fp8(tmp_path):
    make(tmp_path / "fp8", "qwen3_moe", **SIZES)
    to_fp8(tmp_path / "fp8")
    return tmp_path / "fp8"


@loads_matrices
def test_a_config_that_is_given_stays_as_it_is(in_fp8):
    config = AutoConfig.from_pretrained(in_fp8)
    before = copy.deepcopy(config.to_dict())
    from_pretrained(in_fp8, config=config, experts_quantization="fp8")
    assert config.to_dict() == before


@loads_matrices
def test_overrides_of_a_config_inside_leave_its_other_entries(tmp_path):
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    Qwen3_5MoeConfig(text_config={"num_hidden_layers": 4}, quantization_config=declared).save_pretrained(tmp_path)
    kwargs = with_packed_experts(tmp_path, {"text_config": {"hidden_size": 128}, "revision": "main", "key": 1}, "fp8")
    assert kwargs.keys() == {"config", "revision", "key"}
    text = kwargs["config"].text_config
    assert (text.num_hidden_layers, text.hidden_size) == (4, 128)


@loads_matrices
def test_overrides_by_keyword_reach_the_config_of_a_quantized_checkpoint(in_fp8):
    model = from_pretrained(in_fp8, experts_quantization="fp8", num_hidden_layers=1, dtype=torch.bfloat16)
    assert len(model.model.layers) == model.config.num_hidden_layers == 1 < config_in(in_fp8)["num_hidden_layers"]
    assert model.dtype == torch.bfloat16


def test_a_config_json_whose_text_model_declares_the_quantization_is_quantized():
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    entries = {"text_config": {"quantization_config": declared}}
    for inside in (entries, {"thinker_config": entries}):
        assert declared_quantization(inside).format_name() == "fp8"
    assert declared_quantization(Qwen3OmniMoeConfig(thinker_config=entries)).format_name() == "fp8"


def test_two_models_built_at_once_leave_transformers_log_level_as_it_was(monkeypatch):
    entries = json.loads(build("qwen3_moe", num_hidden_layers=1).config.to_json_string())
    path = Path("config.json")
    construct, first_is_done, threads = config_only._construct, threading.Event(), []

    def overlapping(*arguments):
        if threads:  # the second
            first_is_done.wait(5)
        else:
            threads.append(threading.Thread(target=config_only.build_from_config, args=(entries, path)))
            threads[0].start()
            threads[0].join(0.1)
        return construct(*arguments)

    monkeypatch.setattr(config_only, "_construct", overlapping)
    before = logging.get_verbosity()
    config_only.build_from_config(entries, path)
    first_is_done.set()
    threads[0].join()
    assert logging.get_verbosity() == before


def test_a_config_with_adapters_of_experts_leaves_the_filters_of_warnings_as_they_were():
    model = build("qwen3_moe", num_hidden_layers=1)
    before = list(warnings.filters)
    get_peft_model(model, lora_config(model, r=4, experts_r=2))
    assert warnings.filters == before


def test_a_text_model_that_ignores_images_says_so_once(caplog):
    model = build("qwen3_moe", num_hidden_layers=1)
    patch_model(model)
    for _ in range(2):
        model(**batch(), pixel_values=torch.zeros(1))
    (said,) = (message for message in caplog.messages if "pixel_values" in message)
    assert said.startswith("sonicmoe_hf: Qwen3MoeForCausalLM takes no pixel_values, and ignores what it gets")


@pytest.mark.slow
def test_a_compiled_text_model_says_so_too(caplog):
    model = build("qwen3_moe", num_hidden_layers=1)
    patch_model(model)
    torch.compile(model, backend="eager", fullgraph=True)(**batch(), pixel_values=torch.zeros(1))
    assert "sonicmoe_hf: Qwen3MoeForCausalLM takes no pixel_values" in caplog.text


def test_nothing_is_said_of_a_class_that_may_take_images_out_of_its_keyword_arguments(caplog):
    class WithImages(Qwen3MoeForCausalLM):
        def forward(self, input_ids, **kwargs):
            assert kwargs.pop("pixel_values") is not None
            return super().forward(input_ids=input_ids, **kwargs)

    model = WithImages(build("qwen3_moe", num_hidden_layers=1).config)
    patch_model(model)
    model(**batch(), pixel_values=torch.zeros(1))
    assert "pixel_values" not in caplog.text


@pytest.mark.parametrize(
    "config_class, architectures, auto_class",
    [
        (Qwen3_5MoeConfig, ["Qwen3_5MoeForConditionalGeneration"], AutoModelForImageTextToText),
        (Qwen3_5MoeConfig, ["Qwen3_5MoeForCausalLM"], AutoModelForCausalLM),
        (Qwen3_5MoeConfig, None, AutoModelForCausalLM),
        (Qwen3MoeConfig, ["Qwen3MoeForSequenceClassification"], AutoModelForSequenceClassification),
        (Qwen3MoeConfig, ["Qwen3MoeForTokenClassification"], AutoModelForTokenClassification),
        (Qwen3MoeConfig, ["Qwen3MoeModel"], AutoModelForCausalLM),
    ],
)
def test_the_class_that_a_checkpoint_names_is_loaded_before_its_text_model(
    config_class, architectures, auto_class, tmp_path
):
    config_class(architectures=architectures).save_pretrained(tmp_path)
    assert _auto_class(tmp_path, {}) is auto_class
