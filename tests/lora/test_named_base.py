"""An adapter's own base, where another family's model gets it."""

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import make
from peft import PeftModel

import sonicmoe_hf
from sonicmoe_hf import convert_checkpoint, merge_adapter
from sonicmoe_hf.lora import named_base

WORDS = "trained on {base}, of the family qwen3_moe, and {model} is of olmoe"


@pytest.mark.pinned
def test_a_model_of_another_family_than_the_adapters_base_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(named_base, "_said", set())
    base, other, adapter = (tmp_path / name for name in ("base", "other", "adapter"))
    make(base, "qwen3_moe", dtype=torch.float32)
    make(other, "olmoe", dtype=torch.float32)
    convert_checkpoint(base, tmp_path / "native", "native")
    adapt(sonicmoe_hf.from_pretrained(base), adapter, target_modules=["q_proj", "o_proj"])
    for _ in range(2):
        PeftModel.from_pretrained(sonicmoe_hf.from_pretrained(other), adapter)
    (record,) = caplog.records
    assert WORDS.format(base=base, model="this OlmoeForCausalLM") in record.getMessage()
    notices = merge_adapter(other, adapter, tmp_path / "wrong").notices
    assert any(WORDS.format(base=base, model=other) in notice for notice in notices)
    for own in ("base", "native"):
        assert not any(
            "trained on" in notice
            for notice in merge_adapter(tmp_path / own, adapter, tmp_path / f"{own}-merged").notices
        )
