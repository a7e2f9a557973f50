"""Adapters that vLLM would serve in part, or not at all, are refused before an engine starts."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import vllm_stand_in
from helpers.rl import load, make
from helpers.rl_models import adapted
from peft import IA3Config, LoraConfig, get_peft_model
from trl import GRPOTrainer as TRLsGRPOTrainer

import sonicmoe_hf
from sonicmoe_hf.trl import GRPOTrainer
from sonicmoe_hf.trl.adapter_versions import AdapterVersions, Version, adapter_of
from sonicmoe_hf.trl.engine import EngineWithAdapter
from sonicmoe_hf.trl.gathering import gathered_factors
from sonicmoe_hf.trl.generation import AdapterGeneration
from sonicmoe_hf.trl.rollouts import GeneratedSequences

REFUSED = {
    "vLLM leaves out what use_dora=True trains": {"target_modules": ["q_proj"], "use_dora": True},
    "vLLM leaves out what bias='all' trains": {"target_modules": ["q_proj"], "bias": "all"},
    r"vLLM leaves out what modules_to_save=\['lm_head'\] trains": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head"],
    },
    "embed_tokens.lora_embedding_A is neither lora_A nor lora_B": {"target_modules": ["embed_tokens"]},
    "adapts a router": {"target_parameters": ["mlp.gate.weight"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_adapter_that_vllm_serves_in_part_is_refused(message, base, engine, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(GRPOTrainer, base, tmp_path, peft_config=LoraConfig(r=4, **REFUSED[message]))
    assert not engine.made


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="of an environment without vLLM")
def test_trl_says_what_to_install_where_there_is_no_vllm(base, tmp_path):
    with pytest.raises(ImportError, match=r"vLLM is not available .* Please install vLLM"):
        make(GRPOTrainer, base, tmp_path)


def test_no_adapter_and_several_are_refused(base, engine, tmp_path):
    with pytest.raises(ValueError, match=r"the model has none; give peft_config=sonicmoe_hf.lora_config\(model\)"):
        make(GRPOTrainer, base, tmp_path, peft_config=None)
    model = load(base)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model))
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"\['default', 'other'\] are active; activate one with set_adapter"):
        make(GRPOTrainer, base, tmp_path, model=model, peft_config=None)
    model.set_adapter("other")
    assert adapter_of(model) == "other"
    other = get_peft_model(load(base), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"vLLM serves LoRA, not .*IA3; give peft_config="):
        adapter_of(other)


def test_adapters_of_models_without_a_hub_layout_and_of_fsdps_first_version_are_refused(base, tmp_path):
    model = adapted(base)
    with pytest.raises(RuntimeError, match="use fsdp_version: 2 in accelerate's config"):
        gathered_factors(torch.nn.ModuleDict({"_fsdp_wrapped_module": model}), "default", torch.device("cpu"))
    config = model.get_base_model().config
    config.__class__ = type("OwnConfig", (type(config),), {"model_type": "of_our_own"})
    with pytest.raises(ValueError, match=r"form of the adapter needs the model in the hub's layout: .*of_our_own"):
        AdapterVersions(model, None, tmp_path, torch.float32)


@pytest.mark.parametrize("packs", [False, True])
def test_attach_names_our_trainer_where_trls_own_would_send_experts_that_cannot_be_sent(packs, base, engine, tmp_path):
    """Adapters on experts, or packed experts below others."""
    model = load(base, experts_quantization="nf4") if packs else load(base)
    adapter = sonicmoe_hf.lora_config(model)
    if packs:
        adapter = LoraConfig(target_modules=["q_proj"])
    trainer = make(TRLsGRPOTrainer, base, tmp_path, model=model, peft_config=adapter)
    with pytest.raises(ValueError, match=r"from sonicmoe_hf\.trl import GRPOTrainer"):
        sonicmoe_hf.attach(trainer)
    plain = make(TRLsGRPOTrainer, base, tmp_path, {"use_vllm": False}, model=load(base))
    sonicmoe_hf.attach(plain)
    assert torch.is_grad_enabled()


def test_completions_without_experts_and_adapters_that_vllm_does_not_load_are_errors(tmp_path, monkeypatch):
    llm = SimpleNamespace(llm_engine=SimpleNamespace(add_lora=lambda request: False), routed_experts=[None])
    generation = SimpleNamespace(mode="colocate", llm=llm, tensor_parallel_size=1, sequences=GeneratedSequences())
    with pytest.raises(RuntimeError, match="no routed experts for some completion; start it with --enable-return"):
        AdapterGeneration._keep(generation, [[1]], [[2]])
    monkeypatch.setitem(sys.modules, "vllm.lora.request", vllm_stand_in)
    with pytest.raises(RuntimeError, match=r"did not load the adapter in .*of-one"):
        EngineWithAdapter(llm).load(Version("of-1", 1, tmp_path / "of-one", True))


def test_sampling_that_changes_vllms_log_probabilities_alone_is_said(base, engine, tmp_path, caplog):
    make(GRPOTrainer, base, tmp_path, {"top_p": 0.9, "min_p": 0.1})
    assert "of the distribution that top_p, min_p left, and the trainer's of the whole one" in caplog.text
