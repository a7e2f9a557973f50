"""merge of every family that is built small here: what PEFT's merge gives, in plain Transformers, under the base's names."""

import json

import pytest
import torch
from helpers.checkpoints import config_in, edit_config, rewrite, same_bits, tensors_in
from helpers.models import relative_error
from helpers.small_families import SMALL_FAMILIES, adapted_names, small_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sonicmoe_hf import CheckpointError, merge_adapter

TOLERANCE = 1e-5  # fp32: the products summed in another order, through two layers
IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(3))
BESIDE = {  # what a model's class does not know: layers for multi-token prediction, indices, another vision tower
    "model.layers.99.mtp_block.weight": torch.randn(4, 4, generator=torch.Generator().manual_seed(4)).bfloat16(),
    "a_table_of_indices": torch.arange(7),
}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def load(folder, cls):
    model, info = cls.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    return model


def train_one_step(model):
    """Its LoRA adapter after a step that makes B other than zero."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=IDS).logits.square().mean().backward()
    optimizer.step()
    return model.eval()


def adapt(model, folder):
    modules, parameters = adapted_names(model)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=modules, target_parameters=parameters)
    adapted = train_one_step(get_peft_model(model, config))
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_it_is_what_peft_merges_and_other_tensors_keep_their_bytes(family, tmp_path):
    base, merged = tmp_path / "base", tmp_path / "merged"
    model = small_model(family)
    model.save_pretrained(base)
    rewrite(base, {**tensors_in(base), **BESIDE})
    model = load(base, type(model))
    before = logits(model)
    by_peft = adapt(model, tmp_path / "adapter")
    expected = logits(by_peft)
    merge_adapter(base, tmp_path / "adapter", merged)
    assert relative_error(logits(load(merged, type(model))), expected) < TOLERANCE
    assert relative_error(before, expected) > 0.1, "the adapter does something"
    by_peft.save_pretrained(tmp_path / "by peft")
    stored, found, whole = (tensors_in(folder) for folder in (base, merged, tmp_path / "by peft"))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    changed = {name for name in stored if not same_bits({name: stored[name]}, {name: found[name]})}
    assert changed == {name for name in whole if name in stored and not torch.equal(stored[name], whole[name])}
    assert max(relative_error(found[name], whole[name]) for name in changed) < TOLERANCE
    assert config_in(merged) == config_in(base)
