"""What vLLM would serve in part, or not at all, is refused before an engine starts."""

import pytest
import torch
from helpers.rl import loaded, make
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer as TRLsGRPOTrainer

import sonicmoe_hf
from sonicmoe_hf.trl import GRPOTrainer

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


def test_no_adapter_and_several_are_refused(base, engine, tmp_path):
    with pytest.raises(ValueError, match=r"the model has none; give peft_config=sonicmoe_hf.lora_config\(model\)"):
        make(GRPOTrainer, base, tmp_path, peft_config=None)
    model = loaded(base)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model))
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"\['default', 'other'\] are active"):
        make(GRPOTrainer, base, tmp_path, model=model, peft_config=None)


@pytest.mark.parametrize("packs", [False, True])
def test_attach_names_our_trainer_where_trls_own_would_send_experts_that_cannot_be_sent(packs, base, engine, tmp_path):
    """Adapters on experts, or packed experts below others."""
    model = loaded(base, experts_quantization="nf4") if packs else loaded(base)
    adapter = sonicmoe_hf.lora_config(model)
    if packs:
        adapter = LoraConfig(target_modules=["q_proj"])
    trainer = make(TRLsGRPOTrainer, base, tmp_path, model=model, peft_config=adapter)
    with pytest.raises(ValueError, match=r"from sonicmoe_hf\.trl import GRPOTrainer"):
        sonicmoe_hf.attach(trainer)
    plain = make(TRLsGRPOTrainer, base, tmp_path, {"use_vllm": False}, model=loaded(base))
    sonicmoe_hf.attach(plain)
    assert torch.is_grad_enabled()
