"""Indexers of sparse attention pick the same keys in pieces of queries, and take as much memory as a piece."""

import copy

import pytest
import torch
from helpers.models import gradients_of, relative_error
from helpers.peaks import peak_bytes
from helpers.small_families import families_here, small_model
from transformers import CONFIG_MAPPING

import sonicmoe_hf
from sonicmoe_hf.attention import indexers

SPARSE = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4", "axk2", "dots3_note", "deepseek_v4"]
HERE = [family for family in SPARSE if family in families_here()]
SIZES = {"index_topk": 4, "sliding_window": 8}
GIB = 2**30


def step(model, ids, mask=None):
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=mask, use_cache=False)
    out.logits.square().mean().backward()
    return {"logits": out.logits.detach(), **gradients_of(model)}


@pytest.mark.parametrize("family", HERE)
def test_logits_and_gradients_are_those_of_whole_scores(family, monkeypatch):
    """Both sum in the same order, but that products of fewer rows may be blocked otherwise: 1e-5."""
    model = small_model(family, **SIZES).train()
    ids = torch.randint(3, 50, (2, 22), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    sonicmoe_hf.patch_model(model)
    whole = copy.deepcopy(model)
    indexers.use_whole(whole)
    calls = []
    for name in ("_in_pieces", "_scored"):
        real = getattr(indexers, name)
        monkeypatch.setattr(indexers, name, lambda *args, real=real: calls.append(1) or real(*args))
    monkeypatch.setattr(indexers, "PIECE_BYTES", 4 * 2 * 22 * 5)  # some queries each, of two heads
    expected = step(whole, ids, mask)
    assert not calls
    found = step(model, ids, mask)
    assert calls and found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative_error(found[name], tensor) < 1e-5, name
    sonicmoe_hf.unpatch_model(model)
    calls.clear()
    assert relative_error(step(model, ids, mask)["logits"], expected["logits"]) < 1e-5 and not calls


@pytest.mark.parametrize("family", HERE)
def test_generation_with_a_cache_is_as_before(family, monkeypatch):
    model = small_model(family, **SIZES)
    sonicmoe_hf.patch_model(model)
    ids = torch.randint(3, 50, (2, 18), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **options)
    monkeypatch.setattr(indexers, "PIECE_BYTES", 4 * 2 * 18 * 5)
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5


def test_up_to_index_topk_keys_all_are_picked_without_scores():
    model = small_model("deepseek_v32", index_topk=64)
    sonicmoe_hf.patch_model(model)
    whole = copy.deepcopy(model)
    indexers.use_whole(whole)
    model.model.layers[0].self_attn.indexer.wq_b.forward = None  # would be called
    ids = torch.randint(3, 50, (2, 18))
    assert torch.equal(model(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)


def test_an_indexer_of_deepseek_v32_takes_a_tenth_of_the_memory_at_8192_tokens():
    """32 GiB whole. What stays: three tensors of a piece, 512 MiB each, and picked keys."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    config, num_tokens = CONFIG_MAPPING["deepseek_v32"](), 8192
    indexer = DeepseekV32Indexer(config, 0).bfloat16()

    def inputs():
        sizes = config.hidden_size, config.q_lora_rank, config.qk_rope_head_dim
        hidden, residual, cos = (torch.zeros(1, num_tokens, size, dtype=torch.bfloat16) for size in sizes)
        return hidden, residual, (cos, cos), torch.zeros(1, num_tokens, num_tokens, dtype=torch.bool), None

    assert peak_bytes(inputs, indexer) > 30 * GIB
    indexers.use_pieces(indexer)
    assert peak_bytes(inputs, indexer) < 3 * GIB
