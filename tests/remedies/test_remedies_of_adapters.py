"""Messages of adapters in memory: each is raised, and then what it names is done."""

import json
import shutil

import pytest
import torch
from helpers.adapters import adapt, with_lora
from helpers.checkpoints import load_whole, make
from helpers.models import batch, build, build_patched, logits_of, relative_error
from helpers.said import says, silent
from peft import PeftModel, get_peft_model

import sonicmoe_hf
from sonicmoe_hf import from_pretrained, merge_adapter
from sonicmoe_hf.lora import named_base, packed_base, peft_wrapper
from sonicmoe_hf.patching.moe_layers import find_layers

pytestmark = pytest.mark.pinned
ONE = {"num_hidden_layers": 1}
EXACT = 1e-5  # fp32: sums in another order


@pytest.fixture
def base(tmp_path):
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, **ONE, hidden_size=128, moe_intermediate_size=128)
    return tmp_path / "base"


def test_what_lora_config_is_given():
    model = build("qwen3_moe", **ONE)
    with says(
        "use_dora is True: PEFT does not support it for experts (target_parameters)",
        "or adapt no experts: target_parameters=[]",
    ):
        sonicmoe_hf.lora_config(model, use_dora=True)
    assert get_peft_model(model, sonicmoe_hf.lora_config(model, use_dora=True, target_parameters=[]))
    model = build("qwen3_moe", **ONE)
    with says("but target_parameters adapts no experts: leave one of them out"):
        sonicmoe_hf.lora_config(model, experts_r=2, target_parameters=[])
    with says("which is the experts' too: leave it or experts_r out"):
        sonicmoe_hf.lora_config(model, experts_r=2, rank_pattern={"experts.down_proj": 4})
    ranks = [
        sonicmoe_hf.lora_config(model, 8, **options).rank_pattern
        for options in ({"experts_r": 2}, {"rank_pattern": {"experts.down_proj": 4}}, {"target_parameters": []})
    ]
    assert set(ranks[0].values()) == {2} and ranks[1] == {"experts.down_proj": 4} and not ranks[2]


def test_an_adapter_beside_another_base(base, monkeypatch):
    monkeypatch.setattr(packed_base, "_said", set())
    packed = from_pretrained(base, experts_quantization="nf4", dtype=torch.float32)
    trained = logits_of(adapt(packed, base.with_name("of nf4")))
    words = "or load the base with experts_quantization='nf4'"
    with says(words):
        PeftModel.from_pretrained(from_pretrained(base, dtype=torch.float32), base.with_name("of nf4"))
    packed_base._said.clear()
    with silent(words):
        packed = from_pretrained(base, experts_quantization="nf4", dtype=torch.float32)
        model = PeftModel.from_pretrained(packed, base.with_name("of nf4"))
    assert relative_error(logits_of(model), trained) < EXACT


def test_an_adapter_beside_another_family_gets_its_own_base(tmp_path, monkeypatch):
    monkeypatch.setattr(named_base, "_said", set())
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, **ONE)
    make(tmp_path / "other", "olmoe", dtype=torch.float32, **ONE)
    adapted = adapt(from_pretrained(tmp_path / "base"), tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    words = "it computes something else there; name its own base"
    with says(words):
        PeftModel.from_pretrained(from_pretrained(tmp_path / "other"), tmp_path / "adapter")
    named_base._said.clear()
    with silent(words):
        model = PeftModel.from_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert relative_error(logits_of(model), logits_of(adapted)) < EXACT


def test_an_adapter_of_another_family_or_name_is_merged_into_its_base_or_where_it_says_so(tmp_path):
    make(tmp_path / "base", "qwen3_moe", dtype=torch.float32, **ONE)
    make(tmp_path / "other", "olmoe", dtype=torch.float32, **ONE)
    shutil.copytree(tmp_path / "base", tmp_path / "of another name")
    adapt(from_pretrained(tmp_path / "base"), tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    with says("merge it into the base that it names"):
        print(*merge_adapter(tmp_path / "of another name", tmp_path / "adapter", tmp_path / "merged").notices)
    assert not merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "into its base").notices
    config = tmp_path / "adapter" / "adapter_config.json"
    with says(f"or name this one in {config} as base_model_name_or_path"):
        merge_adapter(tmp_path / "other", tmp_path / "adapter", tmp_path / "meant")
    entries = json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "other")}
    config.write_text(json.dumps(entries))
    assert not merge_adapter(tmp_path / "other", tmp_path / "adapter", tmp_path / "meant").notices


def test_hooks_and_forwards_around_experts_hand_adapters_on(monkeypatch):
    monkeypatch.setattr(peft_wrapper, "_said", set())
    model = with_lora(build_patched("qwen3_moe", **ONE))
    expected = logits_of(model)
    experts = next(find_layers(model)).experts
    handle = experts.register_forward_pre_hook(lambda experts, args, kwargs: (args, {}), with_kwargs=True)
    with says("have it return the keyword arguments that it gets"):
        model(**batch())
    handle.remove()
    handle = experts.register_forward_pre_hook(lambda experts, args, kwargs: (args, kwargs), with_kwargs=True)
    assert torch.equal(logits_of(model), expected)
    handle.remove()
    forward = experts.forward

    def around(hidden_states, top_k_index, top_k_weights):
        return forward(hidden_states, top_k_index, top_k_weights)

    def with_keywords(hidden_states, top_k_index, top_k_weights, **kwargs):
        return forward(hidden_states, top_k_index, top_k_weights, **kwargs)

    words = "hands on no keyword arguments; let it take **kwargs"
    for function in (around, with_keywords):
        function.__wrapped__ = forward
        experts.forward = function
        with says(words) if function is around else silent(words):
            assert relative_error(logits_of(model), expected) < EXACT


def test_adapters_merged_into_packed_experts(base):
    adapt(load_whole(base), base.with_name("adapter"))

    def load():
        packed = from_pretrained(base, experts_quantization="nf4", dtype=torch.float32)
        return PeftModel.from_pretrained(packed, base.with_name("adapter"))

    model = load()
    expected = logits_of(model)
    layer = next(module for module in model.modules() if type(module).__name__ == "ParamWrapper")
    with says("are merged by their model: call its merge_and_unload or merge_adapter"):
        layer.merge()
    model.merge_adapter()
    merged = logits_of(model)
    with says("load the base and the adapter anew"):
        model.unmerge_adapter()
    again = load()
    assert torch.equal(logits_of(again), expected)
    assert torch.equal(logits_of(again.merge_and_unload()), merged)
