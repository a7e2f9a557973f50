"""Whole models with linear attention, convolutions or state spaces train and generate patched as with Transformers."""

import pytest
import torch
from helpers.marks import rest_slow
from helpers.models import assert_all_close, gradients_of, relative_error
from helpers.small_families import families_here, small_model
from helpers.training import checkpoint_layers

import sonicmoe_hf

RECURRENT = [
    "kimi_linear",
    "qwen3_next",
    "bailing_hybrid",
    "glm5_next",
    "granitemoehybrid",
    "inkling",
    "inkling2",
    "jamba",
]
RECURRENT += ["lfm2_moe", "minimax", "nemotron_h", "qwen3_5_moe", "qwen4_exp", "zaya"]
HERE = [folder for folder in RECURRENT if folder in families_here()]
LENGTH = 21  # chunks of 8, the last of 5


def step(model, batch):
    """Compute the logits of real tokens and all gradients of their mean square."""
    model.zero_grad()
    seen = batch["attention_mask"][..., None]
    logits = model(**batch, use_cache=False).logits * seen
    logits.square().mean().backward()
    return {"logits": logits.detach(), **gradients_of(model)}


def batch_of(padded):
    ids = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("folder", rest_slow(HERE, 2))
def test_a_step_is_transformers_own_whole_padded_and_checkpointed(folder):
    """fp32. The experts sum in another order, which the recurrence over tokens makes larger
    (3e-5 of Qwen3-Next): 1e-4."""
    model = small_model(folder).train()
    batches = [batch_of(False), batch_of(True)]
    expected = [step(model, batch) for batch in batches]
    sonicmoe_hf.patch_model(model)
    for kind in (None, "non_reentrant", "reentrant"):
        checkpoint_layers(model, kind)
        model.enable_input_require_grads()
        for batch, theirs in zip(batches, expected):
            assert_all_close(step(model, batch), theirs, 1e-4, "order of sums, through a recurrence")


@pytest.mark.parametrize("folder", rest_slow(HERE, 2))
def test_generation_is_transformers_own(folder):
    model, batch = small_model(folder), batch_of(False)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    expected = model.generate(**batch, **options)
    sonicmoe_hf.patch_model(model)
    found = model.generate(**batch, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-4
