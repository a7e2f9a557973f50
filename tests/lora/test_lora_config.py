"""lora_config: the right names for every family and layout, what is given wins, contradictions are refused."""

import pytest
import torch
from helpers.checkpoints import FAMILIES
from helpers.models import batch, build
from helpers.native import native_twin
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

import sonicmoe_hf

ATTENTION = {"deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}}
GROUPED = {"q_proj", "k_proj", "v_proj", "o_proj"}


def mixtral():
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def adapted_names(model, config):
    """What PEFT adapts: names of modules, and of experts' parameters."""
    modules, parameters = set(), set()
    for name, module in get_peft_model(model, config).named_modules():
        if type(module).__name__ == "ParamWrapper":
            parameters.add((name.replace(".base_layer", "").removeprefix("base_model.model."), module.parameter_name))
        elif hasattr(module, "lora_A"):
            modules.add(name.removeprefix("base_model.model."))
    return modules, parameters


@pytest.mark.parametrize(
    "family, layout", [("mixtral", "hub"), *((family, layout) for family in FAMILIES for layout in ("hub", "native"))]
)
def test_experts_and_attention_are_adapted_and_nothing_else(family, layout, tmp_path):
    model = mixtral() if family == "mixtral" else build(family)
    model = native_twin(model, tmp_path) if layout == "native" else model
    layers = [layer.name for layer in sonicmoe_hf.supports(model)]
    config = sonicmoe_hf.lora_config(model)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (16, 32, 0, "CAUSAL_LM")
    assert len(config.target_parameters) == 2, "short names, as a reader would write them"
    modules, parameters = adapted_names(model, config)
    weights = ("c_fc", "c_proj") if layout == "native" else ("gate_up_proj", "down_proj")
    assert parameters == {(_experts(name), weight) for name in layers for weight in weights}
    attention = ATTENTION.get(family, GROUPED)
    assert modules == {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in attention}


def _experts(layer_name):
    return layer_name if layer_name.endswith(".experts") else f"{layer_name}.experts"


def test_the_adapted_model_trains_and_its_experts_weights_do_not_change():
    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=2))
    model(**batch()).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained and all("lora" in name for name in trained)
    assert any(".experts." in name for name in trained)


def test_what_is_given_wins():
    config = sonicmoe_hf.lora_config(
        build("olmoe"), 4, lora_alpha=3, target_modules=["q_proj"], use_rslora=True, task_type=None,
        rank_pattern={"q_proj": 8}, modules_to_save=["lm_head"],
    )  # fmt: skip
    assert (config.r, config.lora_alpha, config.use_rslora, config.task_type) == (4, 3, True, None)
    assert config.target_modules == {"q_proj"} and config.rank_pattern == {"q_proj": 8}
    assert config.modules_to_save == ["lm_head"]
    with pytest.raises(TypeError, match="no_such_field"):
        sonicmoe_hf.lora_config(build("olmoe"), no_such_field=1)


def test_layers_to_transform_choose_experts_too():
    model = build("qwen3_moe")
    modules, parameters = adapted_names(model, sonicmoe_hf.lora_config(model, layers_to_transform=[1]))
    assert {name.split(".")[2] for name in (*modules, *(name for name, _ in parameters))} == {"1"}


def test_names_that_something_else_shares_are_written_out():
    model = build("qwen3_moe")
    model.vision = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
    model.vision.experts = nn.ParameterDict({"down_proj": torch.zeros(2, 4, 4)})
    modules, parameters = adapted_names(model, sonicmoe_hf.lora_config(model))
    assert not [name for name in modules if "vision" in name]
    assert {name for name, _ in parameters} == {f"model.layers.{i}.mlp.experts" for i in range(2)}


@pytest.mark.parametrize(
    "options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"init_lora_weights": "pissa_niter_4"}], ids=str
)
def test_what_peft_cannot_do_with_experts_is_refused_unless_none_are_adapted(options):
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match=rf"{next(iter(options))} is .*target_parameters=\[\]"):
        sonicmoe_hf.lora_config(model, **options)
    assert sonicmoe_hf.lora_config(model, target_parameters=[], **options).target_modules == GROUPED


def test_a_model_without_experts_is_refused():
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match="no mixture-of-experts layer"):
        sonicmoe_hf.lora_config(nn.Linear(2, 2))
