"""PEFT loads what convert writes and what lora_config makes, also where it takes names for others or renames them."""

from copy import deepcopy

import pytest
import torch
from helpers.adapters import save_with_factors
from helpers.checkpoints import same_bits
from helpers.engine_adapters import edit_adapter_config
from helpers.models import assert_all_close
from helpers.small_families import small_model
from peft import LoraConfig, PeftModel, get_peft_model

from sonicmoe_hf import convert_adapter, lora_config

PREFIX = "base_model.model."
BESIDE = ("shared_experts", "shared_expert", "shared_mlp", "mlp")


@pytest.mark.parametrize(
    "family", ["qwen3_next", "glm4_moe", "deepseek_v3", "hunyuan_v1_moe", "laguna", "mistral_large4", "deepseek_ocr2"]
)
def test_peft_loads_what_convert_writes_of_layers_beside_the_experts(family, tmp_path):
    """Shared experts and dense layers have gate_proj, up_proj and down_proj too, which PEFT
    takes for those of experts."""
    pytest.importorskip(f"transformers.models.{family}")
    model = small_model(family)
    model.save_pretrained(tmp_path / "base")
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj") and name.split(".")[-2] in BESIDE
    ]
    experts = lora_config(model).target_parameters
    config = LoraConfig(
        r=2, target_modules=["o_proj"], target_parameters=[*experts, *(f"{name}.weight" for name in linear)]
    )
    before = model.get_parameter(f"{linear[0]}.weight").detach().clone()
    adapted = save_with_factors(get_peft_model(model, config), tmp_path / "adapter")
    edit_adapter_config(
        tmp_path / "adapter", target_parameters=list(experts), target_modules=["o_proj", *linear], lora_dropout=0.1
    )
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", "hub", trained_on=tmp_path / "base")
    expected = adapted.merge_and_unload().state_dict()
    fresh = type(model).from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "converted").merge_and_unload().state_dict()
    assert linear and not torch.equal(expected[f"{linear[0]}.weight"], before), "the adapter does something"
    assert_all_close(loaded, expected, 1e-6, "fp32: the product of A and B in two orders")


RENAMED = ["deepseek_ocr2", "unlimited_ocr", "mistral_large4", "laguna", "inkling2"]


@pytest.mark.parametrize("family", RENAMED)
def test_what_lora_config_makes_comes_back_however_it_is_loaded(family, tmp_path):
    """PEFT and Transformers rename what they load, and not what they save."""
    pytest.importorskip(f"transformers.models.{family}")
    model = small_model(family)
    config = lora_config(model, r=2, target_modules="all-linear")
    adapted = save_with_factors(get_peft_model(deepcopy(model), config), tmp_path)
    resumed = get_peft_model(deepcopy(model), lora_config(model, r=2, target_modules="all-linear"))
    resumed.load_adapter(tmp_path, "default", is_trainable=True)  # as the Trainer does
    by_transformers = deepcopy(model)
    by_transformers.load_adapter(str(tmp_path))
    for loaded in (PeftModel.from_pretrained(deepcopy(model), tmp_path), resumed, by_transformers):
        assert same_bits(factors_of(loaded), factors_of(adapted))


def factors_of(model):
    parameters = {name.removeprefix(PREFIX): parameter.detach() for name, parameter in model.named_parameters()}
    return {name: parameter for name, parameter in parameters.items() if "lora_" in name}


def test_a_layer_that_no_name_brings_back_is_refused_by_lora_config():
    pytest.importorskip("transformers.models.inkling2")
    model = small_model("inkling2")
    with pytest.raises(
        ValueError, match=r"k_(proj\.)?sconv.weight_proj, whose factors .* do not load again: leave it out"
    ):
        lora_config(model, target_modules=["q_proj", "weight_proj"])
    assert lora_config(model, target_modules=["q_proj"]).target_modules == {"q_proj"}
    excluded = lora_config(model, target_modules=["q_proj", "weight_proj"], exclude_modules=["weight_proj"])
    assert excluded.target_modules >= {"q_proj"}
