"""attn_implementation="torch_pieces" is eager attention of models that choose keys for each query."""

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import gradients_of, relative_error
from helpers.small_families import CHANGES, DEEPSEEK_V4, families_here, small_model

import sonicmoe_hf
from sonicmoe_hf.attention import deepseek_v4, pieces
from sonicmoe_hf.attention.models import choose_attention
from sonicmoe_hf.attention.names import TORCH_PIECES
from sonicmoe_hf.private.replaced import put_back

M3 = {"index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1, "index_n_heads": 2}
M3 = {"text_config": {**M3, "layer_types": ["full_attention", "minimax_m3_sparse"]}}
HERE = [family for family in ("deepseek_v4", "hy_v4", "hy_v4_vl", "minimax_m3_vl") if family in families_here()]
CASES = [("deepseek_v4", kind) for kind in ("full", "left", "right", "packed")]
CASES += [("hy_v4", "left"), ("hy_v4", "packed"), ("hy_v4_vl", "right")]
CASES += [
    ("minimax_m3_vl", "right"),
    ("minimax_m3_vl", "full"),
]  # packed, Transformers counts its blocks from each sequence
pytestmark = pytest.mark.skipif(not HERE, reason="of Transformers 5.23")


@pytest.fixture(autouse=True)
def three_kinds_of_layers(monkeypatch):
    monkeypatch.setitem(CHANGES, "deepseek_v4", DEEPSEEK_V4)
    monkeypatch.setitem(CHANGES, "minimax_m3_vl", M3)


def model_of(family):
    model = small_model(family).train()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    sonicmoe_hf.patch_model(model)
    return model


def batch_of(kind, length=37):
    ids = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(1))
    mask, positions = torch.ones_like(ids), None
    if kind == "left":
        mask[1, :9] = 0
    if kind == "right":
        mask[1, 20:] = 0
    if kind == "packed":
        positions = torch.cat([torch.arange(15), torch.arange(length - 15)]).expand(2, -1)
        mask = None
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def step(model, batch):
    model.zero_grad()
    out = model(**batch, use_cache=False)
    seen = batch["attention_mask"] if batch["attention_mask"] is not None else torch.ones_like(batch["input_ids"])
    (out.logits * seen[..., None]).square().mean().backward()
    return {"logits": (out.logits * seen[..., None]).detach(), **gradients_of(model)}


@pytest.mark.parametrize("family, kind", [case for case in CASES if case[0] in HERE])
def test_logits_and_gradients_are_those_of_eager_attention(family, kind, monkeypatch):
    """fp32; pieces sum gradients in another order: 2e-5, or 1e-7 of the largest gradient, since some nearly cancel."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 4 * 20 * 11)
    model, batch = model_of(family), batch_of(kind)
    expected = step(model, batch)
    choose_attention(model)
    assert model.config.get_text_config()._attn_implementation == TORCH_PIECES
    for gathered_from in (2, 100):
        monkeypatch.setattr(deepseek_v4, "GATHERED_FROM", gathered_from)
        found = step(model, batch)
        assert found.keys() == expected.keys()
        assert relative_error(found.pop("logits"), expected["logits"]) < 1e-6
        largest = max(tensor.norm() for name, tensor in expected.items() if name != "logits")
        for name, tensor in found.items():
            assert (tensor - expected[name]).norm() < 2e-5 * expected[name].norm() + 1e-7 * largest, name


@pytest.mark.parametrize("family", HERE)
def test_generation_in_chunks_and_token_for_token_with_a_cache(family, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 4 * 20 * 11)
    model, ids = model_of(family).eval(), batch_of("full", 21)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "attention_mask": mask}
    expected = model.generate(ids, **options)
    choose_attention(model)
    found = model.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5


def test_adapters_checkpointed_layers_and_autocast(monkeypatch):
    """Layers that are checkpointed make the same; under autocast in bf16, whose error eager attention has too."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4 * 4 * 20 * 11)
    model, batch = model_of("deepseek_v4"), batch_of("left")
    with_lora(model, target_modules=["q_b_proj", "kv_proj", "o_b_proj"])
    expected = step(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = step(model, batch)
    model.set_attn_implementation(TORCH_PIECES)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    found = step(model, batch)
    assert all(relative_error(found[name], tensor) < 2e-5 for name, tensor in expected.items())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = step(model, batch)
    assert relative_error(ours["logits"], expected["logits"]) < 1.2 * relative_error(
        eager["logits"], expected["logits"]
    )


def test_what_it_does_not_compute_is_said():
    model, batch = model_of("deepseek_v4"), batch_of("full")
    model.set_attn_implementation(TORCH_PIECES)
    four = torch.ones(2, 1, 37, 37, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="no 4-D masks of one's own"):
        model(input_ids=batch["input_ids"], attention_mask=four)
    assert model(**batch).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"returns no probabilities \(output_attentions=True\)"):
        model(**batch, output_attentions=True)
    model.set_attn_implementation("eager")
    assert model(**batch, output_attentions=True).attentions[0].shape[-2] == 37
    model.set_attn_implementation(TORCH_PIECES)
    put_back(type(model.model.layers[0].self_attn), "forward")
    with pytest.raises(ValueError, match=r"sonicmoe_hf\.patch_model patched"):
        model(**batch)
