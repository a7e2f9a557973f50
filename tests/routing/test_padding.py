"""Tokens that count as padding: those of the mask's columns that are the call's own, for each router those it
computes."""

import logging

import pytest
import torch
from helpers.models import batch, build_patched, ernie_vl_text, image_tokens
from helpers.training import start_counting
from peft import PrefixTuningConfig, get_peft_model
from transformers import DynamicCache

import sonicmoe_hf
from sonicmoe_hf.routing import padding
from sonicmoe_hf.routing.patched_model import router_hooks, routing_state
from sonicmoe_hf.routing.state import ModelCall

TOP_K = 2


def counted(model, **inputs):
    """Count the tokens that each router counts in one training call, by its layer."""
    start_counting(model)
    model(**inputs)
    totals = {}
    for hook in router_hooks(model):
        rows_E = hook.load.take()[:8]  # then the totals of rounding
        totals[hook.layer_name] = int(rows_E.sum()) // TOP_K
    return totals


def test_a_masks_columns_of_a_cached_prompt_are_not_the_calls_own():
    model, inputs = build_patched("qwen3_moe", use_cache=True), batch(padding=True)
    prompt, cache = batch(length=5, seed=1)["input_ids"], DynamicCache(config=model.config)
    model(input_ids=prompt, past_key_values=cache)
    mask = torch.cat([torch.ones_like(prompt), inputs["attention_mask"]], dim=1)
    tokens = counted(model, input_ids=inputs["input_ids"], attention_mask=mask, past_key_values=cache)
    assert set(tokens.values()) == {int(inputs["attention_mask"].sum())}


def test_a_masks_columns_of_a_tuned_prefix_are_not_the_calls_own():
    model, inputs = build_patched("qwen3_moe", use_cache=True), batch(padding=True)
    tuned = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert set(counted(tuned, **inputs).values()) == {int(inputs["attention_mask"].sum())}


def test_a_mask_that_numbers_the_sequences_it_packs_leaves_out_its_zeros_alone():
    model, inputs = build_patched("qwen3_moe", use_cache=True), batch(padding=True)
    inputs["attention_mask"] = inputs["attention_mask"] * torch.arange(1, 5).unsqueeze(1)
    assert set(counted(model, **inputs).values()) == {int((inputs["attention_mask"] > 0).sum())}


class Reshaping(torch.nn.Module):
    """A model's stack of layers, which gets its mask as the model makes it of a 2-D one."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, attention_mask=None, **kwargs):
        return self.inner(attention_mask=self.change(attention_mask), **kwargs)


def test_an_inner_model_without_a_2d_mask_has_that_of_the_model_around_it():
    model, inputs = build_patched("qwen3_moe", use_cache=True), batch(padding=True)
    model.model = Reshaping(model.model, lambda mask: mask[:, None, None, :].bool())
    assert set(counted(model, **inputs).values()) == {int(inputs["attention_mask"].sum())}


def test_a_mask_that_does_not_fit_is_said_once(caplog, monkeypatch):
    model, inputs = build_patched("qwen3_moe", use_cache=True), batch(padding=True)
    model.model = Reshaping(model.model, lambda mask: mask[:2])
    for layer in model.model.inner.layers:  # attention would not take it
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    monkeypatch.setattr("transformers.models.qwen3_moe.modeling_qwen3_moe.create_causal_mask", lambda **kwargs: None)
    with caplog.at_level(logging.WARNING, logger=padding.__name__):
        assert set(counted(model, **inputs).values()) == {inputs["input_ids"].numel()}
    (said,) = caplog.messages
    assert "has 96 tokens, which an attention mask of shape [2, 24] does not fit: padding cannot be left out" in said
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    forward = padding.Forward(ModelCall(routing_state(model)), None, None, None)
    forward.attention_mask = inputs["attention_mask"]
    with pytest.raises(RuntimeError, match="does not fit"):
        padding.valid_tokens(forward, padding.FAMILIES["qwen3_moe"], "layer", 5, "cpu")


def test_a_mask_of_four_dimensions_in_which_nobody_can_tell_padding_is_said_once(caplog):
    model, inputs = build_patched("qwen3_moe", use_cache=True), batch(padding=True)
    seen = torch.ones(24, 24).tril().bool() & inputs["attention_mask"][:, None, None, :].bool()
    inputs["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with caplog.at_level(logging.WARNING, logger=padding.__name__):
        assert set(counted(model, **inputs).values()) == {inputs["input_ids"].numel()}
        counted(model, **inputs)
    (said,) = caplog.messages
    assert "which an attention mask of shape [4, 1, 24, 24] does not fit" in said


# ERNIE 4.5 VL: tokens of images and of text have routers of their own


def test_ernies_routers_leave_out_the_padding_of_their_own_tokens():
    model, inputs = ernie_vl_text(), batch(padding=True)
    sonicmoe_hf.patch_model(model)
    mask, types = inputs["attention_mask"].bool(), image_tokens(inputs)
    tokens = counted(model, input_ids=inputs["input_ids"], attention_mask=mask, moe_mm_token_type_ids=types)
    assert tokens == {
        "layers.1.mlp.text_moe": (mask & (types == 0)).sum(),
        "layers.1.mlp.vision_moe": (mask & (types != 0)).sum(),
    }
    tokens = counted(model, input_ids=inputs["input_ids"], attention_mask=mask, moe_mm_token_type_ids=0 * types)
    assert tokens == {"layers.1.mlp.text_moe": mask.sum(), "layers.1.mlp.vision_moe": 0}
