"""Step-3.7's experts, whose class is not decorated for Transformers' experts interface, train as with Transformers."""

import copy
import pickle

import pytest
import torch
from helpers.adapters import with_lora
from helpers.models import gradients_of, relative_error
from helpers.small_families import CHANGES, small_model
from transformers import AutoModelForImageTextToText

import sonicmoe_hf
from sonicmoe_hf.patching import adopted

SMALL = {
    "text_config": {
        "swiglu_limits": [0.0, 0.02],
        "mlp_layer_types": ["sparse"] * 2,
        "num_hidden_layers": 2,
        "sliding_window": 8,
    }
}
pytestmark = pytest.mark.pinned


@pytest.fixture
def model(monkeypatch):
    """Build one whose second layer clamps most of its gates."""
    monkeypatch.setitem(CHANGES, "step3p7", SMALL)
    return small_model("step3p7").train()


def step(model):
    ids = torch.randint(3, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.square().mean().backward()
    return {"logits": logits.detach(), **gradients_of(model)}


def test_a_step_patched_and_unpatched(model):
    """fp32, sums in another order: 1e-5."""
    expected = step(model)
    assert all(layer.accelerated for layer in sonicmoe_hf.supports(model))
    other = copy.deepcopy(model)
    sonicmoe_hf.patch_model(model)
    found = step(pickle.loads(pickle.dumps(copy.deepcopy(model))))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative_error(found[name], tensor) < 1e-5, name
    assert not adopted.is_adoptable(model.model.language_model.layers[1].mlp.experts)
    sonicmoe_hf.unpatch_model(model)
    assert relative_error(step(model)["logits"], expected["logits"]) == 0
    assert relative_error(step(other)["logits"], expected["logits"]) == 0


@pytest.mark.parametrize("refused", [{"experts_compute": "fp8"}, {"experts_memory": "much"}])
def test_a_patch_that_is_refused_changes_no_class(model, refused):
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError):
        sonicmoe_hf.patch_model(model, **refused)
    assert [type(module) for module in model.modules()] == before


def test_adapters_train_and_merge(model, tmp_path):
    model.save_pretrained(tmp_path / "base")
    ours = sonicmoe_hf.from_pretrained(tmp_path / "base").train()
    assert type(ours) is type(model)
    adapted = with_lora(ours, target_modules=["q_proj"])
    found = step(adapted)
    sonicmoe_hf.unpatch_model(ours)
    expected = step(adapted)
    assert found.keys() == expected.keys() and any("experts" in name for name in found)
    for name, tensor in expected.items():
        assert relative_error(found[name], tensor) < 1e-5, name
    adapted.save_pretrained(tmp_path / "adapter")
    sonicmoe_hf.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").train()
    assert relative_error(step(merged)["logits"], expected["logits"]) < 1e-5


def test_experts_are_packed_while_they_load_trained_beside_saved_and_merged(monkeypatch, tmp_path):
    """The class has no config until it is patched, which is after loading."""
    monkeypatch.setitem(CHANGES, "step3p7", SMALL)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64)
    small_model("step3p7", **sizes).save_pretrained(tmp_path / "base")
    ours = sonicmoe_hf.from_pretrained(tmp_path / "base", experts_quantization="nf4", dtype=torch.float32).train()
    ours.save_pretrained(tmp_path / "packed")
    again = sonicmoe_hf.from_pretrained(tmp_path / "packed", dtype=torch.float32).train()
    assert torch.equal(step(again)["logits"], step(ours)["logits"])
    adapted = with_lora(ours, target_modules=["q_proj"])
    expected = step(adapted)
    assert any("experts" in name for name in expected)
    adapted.save_pretrained(tmp_path / "adapter")
    sonicmoe_hf.merge_adapter(tmp_path / "packed", tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).train()
    assert relative_error(step(merged)["logits"], expected["logits"]) < 0.02, "weights are rounded to bf16"
