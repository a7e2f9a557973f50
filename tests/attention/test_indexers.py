"""Indexers of sparse attention pick the same keys in pieces of queries, and take as much memory as a piece."""

import copy

import pytest
import torch
from helpers.memory import peak_bytes
from helpers.models import gradients_of, relative_error
from helpers.small_families import CHANGES, families_here, small_model
from transformers import CONFIG_MAPPING

import sonicmoe_hf
from sonicmoe_hf.attention import indexers, pieces
from sonicmoe_hf.attention.models import choose_attention

SPARSE = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4", "axk2", "dots3_note", "deepseek_v4"]
SPARSE += ["minimax_m3_vl"]
BLOCKS = {"index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1}  # MiniMax-M3's
HERE = [family for family in SPARSE if family in families_here()]
SIZES = {"index_topk": 4, "sliding_window": 8, **BLOCKS}
GIB = 2**30
HEADS = 16  # of an indexer: with two, many scores are 0, and which of equals is picked is by chance


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
    indexers.leave_our_forwards(whole)
    calls = []
    for name in ("_in_pieces", "_scored"):
        real = getattr(indexers, name)
        monkeypatch.setattr(indexers, name, lambda *args, real=real, **dim: calls.append(1) or real(*args, **dim))
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 2 * 22 * 5)  # some queries each, of two heads
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
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 2 * 18 * 5)
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5


@pytest.mark.parametrize("family", HERE)
def test_a_prefill_in_chunks_with_a_cache_is_as_whole(family, monkeypatch):
    """`prefill_chunk_size` of Transformers' GenerationConfig, with scores in pieces and attention as from_pretrained
    chooses it. fp32, other sums over masked keys: 1e-5."""
    heads = 2 if family == "minimax_m3_vl" else HEADS  # M3 has one for each group of heads
    model = small_model(family, **SIZES, index_n_heads=heads)
    ids = torch.randint(3, 50, (2, 40), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    sonicmoe_hf.patch_model(model)
    choose_attention(model)
    calls = []
    for name in ("_in_pieces", "_scored"):
        real = getattr(indexers, name)
        monkeypatch.setattr(indexers, name, lambda *args, real=real, **dim: calls.append(1) or real(*args, **dim))
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * heads * 40 * 2)
    for size in (None, 7, 16):
        calls.clear()
        found = model.generate(ids, prefill_chunk_size=size, **options)
        assert calls and torch.equal(found.sequences, expected.sequences)
        assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5


def test_up_to_index_topk_keys_all_are_picked_without_scores():
    model = small_model("deepseek_v32", index_topk=64)
    sonicmoe_hf.patch_model(model)
    whole = copy.deepcopy(model)
    indexers.leave_our_forwards(whole)
    model.model.layers[0].self_attn.indexer.wq_b.forward = None  # would be called
    ids = torch.randint(3, 50, (2, 18))
    assert torch.equal(model(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)


@pytest.mark.pinned
@pytest.mark.slow
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
    indexers.use_our_forwards(indexer)
    assert peak_bytes(inputs, indexer) < 3 * GIB


@pytest.mark.pinned
@pytest.mark.skipif("minimax_m3_vl" not in families_here(), reason="of Transformers 5.23")
def test_an_indexer_of_minimax_m3_takes_a_piece_of_the_memory_at_16384_tokens():
    """Whole, scores of four heads are 4 GiB, and as much where the future is masked."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    config, num_tokens = CONFIG_MAPPING["minimax_m3_vl"]().text_config, 16384
    indexer = MiniMaxM3VLIndexer(config, 0).bfloat16()

    def inputs():
        hidden, cos = (
            torch.zeros(1, num_tokens, n, dtype=torch.bfloat16) for n in (config.hidden_size, config.index_head_dim)
        )
        return hidden, (cos, cos), None, torch.arange(num_tokens)[None]

    assert peak_bytes(inputs, indexer) > 8 * GIB
    indexers.use_our_forwards(indexer)
    assert peak_bytes(inputs, indexer) < 2 * GIB


def visible_by(kind, size, queries, keys):
    """Make a mask [B, 1, S, T] of what queries at the end see."""
    visible = torch.ones(size, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    if kind == "right":
        visible[1, :, :, keys - 5 :] = False
    if kind == "left":
        visible[1, :, :, :5] = False
    if kind == "packed":
        visible[1, 0, 7:, :7] = False
    return visible


@pytest.mark.parametrize("kind, queries", [("full", 19), ("right", 19), ("left", 19), ("full", 3), ("packed", 19)])
@pytest.mark.skipif("qwen4_exp" not in families_here(), reason="of Transformers 5.23")
def test_qwen4_exps_indexer_selects_the_same_without_its_loop(kind, queries, monkeypatch):
    monkeypatch.setitem(CHANGES["qwen4_exp"], "indexer_n_heads", HEADS)
    config = small_model("qwen4_exp").config.get_text_config()
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer

    torch.manual_seed(0)
    indexer, size, keys = Qwen4ExpTextQSAIndexer(config, 0), 2, 19
    hidden = torch.randn(size, keys, config.hidden_size)
    angles = torch.rand(size, keys, config.indexer_head_dim // 2).repeat(1, 1, 2)
    mask = visible_by(kind, size, queries, keys)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 5 * (HEADS * 9 + 4 * 19))  # five queries

    class Cache:
        """Hands out the keys of all tokens."""

        def update_indexer(self, own, layer_idx):
            return indexer.index_qk_proj(hidden)[..., -config.indexer_head_dim :]

    cache = Cache() if queries < keys else None
    given = hidden[:, -queries:], (angles.cos(), angles.sin()), mask, cache
    expected = indexer(*given)
    indexers.use_our_forwards(indexer)
    with torch.no_grad():
        assert torch.equal(indexer(*given) & mask, expected & mask)
    assert 0 < (expected & mask).sum() < mask.sum(), "some keys are left out"


@pytest.mark.skipif("qwen4_exp" not in families_here(), reason="of Transformers 5.23")
def test_qwen4_exp_trains_as_with_its_loop(monkeypatch):
    monkeypatch.setitem(CHANGES["qwen4_exp"], "indexer_n_heads", HEADS)
    model = small_model("qwen4_exp").train()
    sonicmoe_hf.patch_model(model)
    loop = copy.deepcopy(model)
    indexers.leave_our_forwards(loop)
    ids = torch.randint(3, 50, (2, 15), generator=torch.Generator().manual_seed(1))
    found, expected = step(model, ids), step(loop, ids)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
