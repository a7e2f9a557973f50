"""lora_config: the right names for every family and layout, what is given wins, contradictions are refused."""

import inspect
import json
import warnings

import peft
import pytest
import torch
import transformers
from helpers.adapters import forbid_merging
from helpers.checkpoints import FAMILIES
from helpers.marks import rest_pinned
from helpers.models import batch, build, build_patched
from helpers.native import native_twin
from helpers.small_families import small_model
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import tuners_utils
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import peft as integration

import sonicmoe_hf
from sonicmoe_hf.tools.random_models import config_of

ATTENTION = {"deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}}
GROUPED = {"q_proj", "k_proj", "v_proj", "o_proj"}


every_layout = pytest.mark.parametrize(
    "family, layout", [("mixtral", "hub"), *((family, layout) for family in FAMILIES for layout in ("hub", "native"))]
)


def adapted(model, config):
    """List rank and scale of what PEFT adapts: modules by name, experts' parameters by the module's name and theirs."""
    modules, parameters = {}, {}
    for name, module in get_peft_model(model, config).named_modules():
        if not hasattr(module, "lora_A"):
            continue
        name, found = name.removeprefix("base_model.model."), (module.r["default"], module.scaling["default"])
        if type(module).__name__ == "ParamWrapper":
            parameters[name.replace(".base_layer", ""), module.parameter_name] = found
        else:
            modules[name] = found
    return modules, parameters


@pytest.mark.parametrize("family, layout", [("qwen3_moe", "hub"), ("gpt_oss", "hub"), ("deepseek_v3", "native")])
def test_a_model_that_has_an_adapter_gets_the_config_of_one_that_has_none(family, layout, tmp_path):
    model = build(family)
    model = native_twin(model, tmp_path) if layout == "native" else model
    options = [{}, {"experts_r": 2}, {"layers_to_transform": [1]}]
    first, *others = [sonicmoe_hf.lora_config(model, r=4, **each).to_dict() for each in options]
    peft = get_peft_model(model, sonicmoe_hf.lora_config(model, r=4))
    for with_adapter in (peft, peft.get_base_model()):
        again = [sonicmoe_hf.lora_config(with_adapter, r=4, **each).to_dict() for each in options]
        assert again == [first, *others]
    peft.add_adapter("second", sonicmoe_hf.lora_config(peft, r=4))
    wrappers = [module for module in peft.modules() if type(module).__name__ == "ParamWrapper"]
    assert wrappers and all(set(wrapper.lora_A) == {"default", "second"} for wrapper in wrappers)


@every_layout
def test_experts_and_attention_are_adapted_and_nothing_else(family, layout, tmp_path):
    model = build(family)
    model = native_twin(model, tmp_path) if layout == "native" else model
    layers = [layer.name for layer in sonicmoe_hf.supports(model)]
    config = sonicmoe_hf.lora_config(model)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (16, 32, 0, "CAUSAL_LM")
    assert len(config.target_parameters) == 2, "short names, as a reader would write them"
    modules, parameters = adapted(model, config)
    weights = ("c_fc", "c_proj") if layout == "native" else ("gate_up_proj", "down_proj")
    assert parameters.keys() == {
        (f"{name.removesuffix('.experts')}.experts", weight) for name in layers for weight in weights
    }
    attention = ATTENTION.get(family, GROUPED)
    assert modules.keys() == {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in attention}


def test_the_adapted_model_trains_and_its_experts_weights_do_not_change():
    model = build_patched("qwen3_moe")
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, r=2))
    model(**batch()).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained and all("lora" in name for name in trained)
    assert any(".experts." in name for name in trained)


def test_what_is_given_wins():
    config = sonicmoe_hf.lora_config(
        build("olmoe"),
        4,
        lora_alpha=3,
        target_modules=["q_proj"],
        use_rslora=True,
        task_type=None,
        rank_pattern={"q_proj": 8},
        modules_to_save=["lm_head"],
    )
    assert (config.r, config.lora_alpha, config.use_rslora, config.task_type) == (4, 3, True, None)
    assert config.target_modules == {"q_proj"} and config.rank_pattern == {"q_proj": 8}
    assert config.modules_to_save == ["lm_head"]


@pytest.mark.parametrize("family", ["afmoe", "beam"])
def test_attention_layers_that_peft_takes_for_experts_are_left_out(family):
    """PEFT takes AFMoE's self_attn.gate_proj for the experts' of older checkpoints, and raises."""
    pytest.importorskip(f"transformers.models.{family}")  # Beam came after the oldest Transformers that we support
    model = small_model(family)
    modules, parameters = adapted(model, sonicmoe_hf.lora_config(model))
    assert {name.rpartition(".")[2] for name in modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {weight for _, weight in parameters} == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    "family, reached, not_reached",
    [
        (
            "qwen3_5_moe",
            {"in_proj_qkv", "in_proj_z", "out_proj", "shared_expert.gate_proj"},
            {"gate", "qkv", "lm_head"},
        ),
        ("qwen3_next", {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"}, {"gate", "shared_expert.gate_proj"}),
        ("granitemoehybrid", {"in_proj", "input_linear", "q_proj"}, {"out_proj", "router"}),
        ("jamba", {"in_proj", "x_proj", "out_proj", "q_proj"}, {"dt_proj", "router"}),
        ("nemotron_h", {"in_proj", "shared_experts.up_proj", "q_proj"}, {"out_proj", "gate"}),
        ("lfm2_moe", {"conv.in_proj", "conv.out_proj", "q_proj"}, {"gate", "lm_head"}),
        ("phimoe", {"q_proj", "o_proj"}, {"router", "lm_head"}),
        ("gemma4", {"q_proj", "mlp.gate_proj"}, {"router.proj", "lm_head"}),
        ("hunyuan_v1_moe", {"q_proj", "o_proj"}, {"gate.wg"}),
        ("zaya", {"o_proj"}, {"gate.down_proj", "router_mlp.out_proj"}),
        ("deepseek_v32", {"q_a_proj", "o_proj"}, {"indexer.wk", "indexer.weights_proj"}),
        ("deepseek_v4", {"q_a_proj", "o_b_proj"}, {"o_a_proj", "indexer.weights_proj"}),
    ],
)
def test_all_linear_means_the_layers_of_the_decoder_that_an_adapter_reaches(family, reached, not_reached):
    pytest.importorskip(f"transformers.models.{family}")
    model = small_model(family)
    config = sonicmoe_hf.lora_config(model, target_modules="all-linear")
    modules, parameters = adapted(model, config)
    assert config.r == 16 and not config.rank_pattern and len({weight for _, weight in parameters}) == 2
    ends = {".".join(name.split(".")[-parts:]) for name in modules for parts in (1, 2)}
    assert reached <= ends and not not_reached & ends
    assert not [name for name in modules if "visual" in name]


def test_layers_to_transform_choose_experts_too():
    model = build("qwen3_moe")
    modules, parameters = adapted(model, sonicmoe_hf.lora_config(model, layers_to_transform=[1]))
    assert {name.split(".")[2] for name in (*modules, *(name for name, _ in parameters))} == {"1"}


def test_names_that_something_else_shares_are_written_out():
    model = build("qwen3_moe")
    model.vision = nn.ModuleDict({"q_proj": nn.Linear(4, 4)})
    model.vision.experts = nn.ParameterDict({"down_proj": torch.zeros(2, 4, 4)})
    modules, parameters = adapted(model, sonicmoe_hf.lora_config(model))
    assert not [name for name in modules if "vision" in name]
    assert {name for name, _ in parameters} == {f"model.layers.{i}.mlp.experts" for i in range(2)}


@pytest.mark.parametrize(
    "options", [{"lora_bias": True}, {"use_dora": True}, {"init_lora_weights": "pissa_niter_4"}], ids=str
)
def test_what_peft_cannot_do_with_experts_is_refused_unless_none_are_adapted(options):
    model = build("qwen3_moe")
    with pytest.raises(ValueError, match=rf"{next(iter(options))} is .*target_parameters=\[\]"):
        sonicmoe_hf.lora_config(model, **options)
    assert sonicmoe_hf.lora_config(model, target_parameters=[], **options).target_modules == GROUPED


def test_dropout_stays_with_linear_layers_and_outlives_a_save_that_peft_loads_by_itself(tmp_path, caplog):
    def rates(model):
        layers = [module for module in model.modules() if "default" in getattr(module, "lora_dropout", {})]
        is_expert = [type(layer).__name__ == "ParamWrapper" for layer in layers]
        assert len(layers) == 12 and sum(is_expert) == 4
        return {getattr(layer.lora_dropout["default"], "p", 0) for layer, no in zip(layers, is_expert) if not no}, {
            type(layer.lora_dropout["default"]) for layer, yes in zip(layers, is_expert) if yes
        }

    config = sonicmoe_hf.lora_config(build("qwen3_moe"), r=2, lora_dropout=0.0625)
    model = get_peft_model(build_patched("qwen3_moe"), config)
    get_peft_model(build_patched("qwen3_moe"), config)
    assert rates(model) == ({0.0625}, {nn.Identity}) and config.lora_dropout == 0.0625
    assert caplog.text.count("lora_dropout=0.0625 is of the linear layers alone: experts have none") == 1
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        get_peft_model(build("qwen3_moe"), config)  # PEFT's own, of a model that is not patched
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0
    PeftModel.from_pretrained(build("qwen3_moe"), tmp_path / "adapter")
    served = PeftModel.from_pretrained(build_patched("qwen3_moe"), tmp_path / "adapter")
    assert rates(served)[0] == {0}
    served.save_pretrained(tmp_path / "again")
    for folder in ("adapter", "again"):
        again = PeftModel.from_pretrained(build_patched("qwen3_moe"), tmp_path / folder, is_trainable=True)
        assert rates(again) == ({0.0625}, {nn.Identity})


def test_a_model_without_experts_is_refused():
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match="no mixture-of-experts layer"):
        sonicmoe_hf.lora_config(nn.Linear(2, 2))


# the experts' own rank


@every_layout
@pytest.mark.parametrize("rslora", rest_pinned([True, False]))
def test_experts_have_their_own_rank_and_the_same_scale(family, layout, rslora, tmp_path):
    model = build(family)
    model = native_twin(model, tmp_path) if layout == "native" else model
    config = sonicmoe_hf.lora_config(model, 16, experts_r=2, use_rslora=rslora)
    modules, experts = adapted(model, config)
    assert len(experts) == 2 * len(sonicmoe_hf.supports(model))
    assert set(experts.values()) == {(2, 32 / 2**0.5 if rslora else 2.0)}
    assert set(modules.values()) == {(16, 8.0 if rslora else 2.0)}


def test_experts_r_stands_beside_patterns_for_other_modules_and_other_names():
    model = build("olmoe")
    model.vision = nn.ModuleDict({"experts": nn.ParameterDict({"down_proj": torch.zeros(2, 4, 4)})})
    config = sonicmoe_hf.lora_config(
        model, 6, experts_r=4, lora_alpha=5, rank_pattern={"q_proj": 8}, alpha_pattern={"q_proj": 3}
    )
    assert config.rank_pattern["q_proj"] == 8 and config.alpha_pattern["q_proj"] == 3
    assert config.alpha_pattern["experts.gate_up_proj"] == pytest.approx(5 * 4 / 6)
    assert not [key for key in config.rank_pattern if key.endswith("vision.experts.down_proj")]
    unset = sonicmoe_hf.lora_config(build("olmoe"), 6)
    assert unset.rank_pattern == unset.alpha_pattern == {}


def test_add_adapter_takes_the_config_where_peft_is_new_enough_and_else_says_what_works(monkeypatch):
    model = build("qwen3_moe", num_hidden_layers=1)
    sonicmoe_hf.patch_model(model)
    config = sonicmoe_hf.lora_config(model, r=2)
    if Version(peft.__version__) >= Version(integration.MIN_PEFT_VERSION):
        model.add_adapter(config)
        with forbid_merging():
            model(**batch()).loss.backward()
        assert sum("experts" in name and p.grad is not None for name, p in model.named_parameters()) == 4
        monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "99")
    other = build("qwen3_moe", num_hidden_layers=1)
    words = f"Transformers {transformers.__version__} need PEFT .* or newer, and PEFT is {peft.__version__}; use peft.get_p"
    with pytest.raises(ValueError, match=words):
        other.add_adapter(config)
    get_peft_model(other, config)


def test_nobody_is_told_that_the_experts_own_rank_is_ignored(tmp_path):
    """PEFT looks for the names in patterns among modules alone, and uses those of parameters all the same."""
    model = build("qwen3_moe")
    config = sonicmoe_hf.lora_config(model, 16, experts_r=2, rank_pattern={r"layers\.1\..*q_proj": 4})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        get_peft_model(model, config).save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(build("qwen3_moe"), tmp_path)
        loaded.load_adapter(tmp_path, "again")
        assert not [warning for warning in heard if "_pattern" in str(warning.message)]
    ranks = {factor.shape[0] // 8 for name, factor in loaded.named_parameters() if ".experts.lora_A" in name}
    assert ranks == {2}
    if "were ignored" in inspect.getsource(tuners_utils):  # not in PEFT 0.20
        with warnings.catch_warnings(record=True) as heard:  # PEFT itself adds the experts and their pattern
            warnings.simplefilter("always")
            loaded = get_peft_model(build("qwen3_moe"), LoraConfig(r=4, target_modules="all-linear"))
        assert not [warning for warning in heard if "_pattern" in str(warning.message)]
        assert loaded.peft_config["default"].rank_pattern == {r".*\.gate_up_proj": 8}
        config = sonicmoe_hf.lora_config(build("olmoe"), 16, experts_r=2, rank_pattern={"no_such_layer": 4})
        with pytest.warns(RuntimeWarning, match="rank_pattern keys did not match .*no_such_layer"):
            get_peft_model(build("olmoe"), config)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"experts_r": 2, "target_parameters": []}, "target_parameters adapts no experts"),
        (
            {"experts_r": 2, "rank_pattern": {"gate_up_proj": 3}},
            "rank_pattern names 'gate_up_proj', which is the experts",
        ),
        ({"experts_r": 2, "alpha_pattern": {r".*\.down_proj": 3}}, "alpha_pattern names .* leave it or experts_r out"),
    ],
)
def test_a_rank_of_experts_that_contradicts_the_rest_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        sonicmoe_hf.lora_config(build("qwen3_moe"), **options)


@pytest.mark.pinned
def test_qwen3_30b_a3bs_experts_have_629_million_adapter_parameters_at_16_and_an_eighth_of_them_at_2():
    """Two of its 48 layers are built, which are alike."""
    whole, built = (config_of("Qwen/Qwen3-30B-A3B", layers) for layers in (None, 2))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)

    def parameters(**options):
        peft = get_peft_model(model, sonicmoe_hf.lora_config(model, 16, **options), low_cpu_mem_usage=True)
        count = sum(p.numel() for name, p in peft.named_parameters() if "lora_" in name and ".experts." in name)
        peft.unload()
        return count * whole.num_hidden_layers // built.num_hidden_layers

    assert whole.num_hidden_layers == 48 and set(whole.mlp_only_layers) == set(), "every layer has experts"
    assert parameters() == 629_145_600 and parameters(experts_r=2) == 629_145_600 // 8
