"""An adapter's own base, where another family's model gets it."""

import json
import re

import pytest
import torch
from helpers.adapters import adapt
from helpers.checkpoints import make
from peft import PeftModel

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, convert_checkpoint, merge_adapter
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
    with pytest.raises(CheckpointError, match=re.escape(WORDS.format(base=base, model=other))):
        merge_adapter(other, adapter, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    for own in ("base", "native"):
        assert not merge_adapter(tmp_path / own, adapter, tmp_path / f"{own}-merged").notices


def test_a_base_of_another_name_than_the_adapters_is_told_and_copies_of_one_name_are_not(tmp_path):
    base, adapter = tmp_path / "org" / "model", tmp_path / "adapter"
    make(base, "qwen3_moe", dtype=torch.float32)
    adapt(sonicmoe_hf.from_pretrained(base), adapter, target_modules=["q_proj", "o_proj"])
    for named, is_other in (("unsloth/Model", False), ("org/model-Instruct", True), ("/elsewhere/model", False)):
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        notices = merge_adapter(base, adapter, tmp_path / "merged" / named.replace("/", "-")).notices
        words = f"the adapter names {named} as its base, and was merged into {base}; if these are two models"
        assert [notice.startswith(words) for notice in notices] == [True] * is_other
