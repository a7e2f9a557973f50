"""LoRA adapters on experts across the layouts: converted, or refused; never loaded with rows in the wrong order."""

import re
import sys
from functools import partial

import pytest
import torch
from helpers import engine_adapters
from helpers.adapters import EXPERTS, NATIVE_EXPERTS, adapt, lora, random_factors
from helpers.checkpoints import FAMILIES, edit_tensors, same_bits, tensors_in
from helpers.engine_adapters import adapter_config, edit_adapter_config
from helpers.marks import crossed, rest_pinned
from helpers.models import assert_all_close, batch, build, logits_of, loss_and_gradients, relative_error
from helpers.native import native_twin, save_both
from helpers.training import POLICY, Watch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, convert_adapter
from sonicmoe_hf.tools.cli.main import main

assert_refused = partial(engine_adapters.assert_refused, layout="native")
every_family = pytest.mark.parametrize("family", rest_pinned(FAMILIES))
PARAMETERS = {"hub": EXPERTS, "native": NATIVE_EXPERTS}
SUMS = "fp32: Transformers sums in another order"
load = AutoModelForCausalLM.from_pretrained


def adapted_in(layout, family, folder, parameters=None, **options):
    """Save the model in both layouts in `folder`, with an adapter on this one there; return PEFT's model."""
    save_both(build(family), folder)
    parameters = PARAMETERS[layout] if parameters is None else parameters
    return adapt(load(folder / layout), folder / "adapter", parameters, **options)


def assert_serves_and_merges(adapted, tmp_path):
    """Check that the converted adapter, of a native base, computes what it was converted from, and comes back to the
    hub's layout."""
    native = tmp_path / "native"
    model = PeftModel.from_pretrained(load(native), tmp_path / "converted")
    assert relative_error(logits_of(model), logits_of(adapted)) < 1e-5, SUMS
    sonicmoe_hf.merge_adapter(native, tmp_path / "converted", tmp_path / "merged", "hub")
    merged = load(tmp_path / "merged")
    assert relative_error(logits_of(merged), logits_of(adapted)) < 1e-5, SUMS
    convert_adapter(tmp_path / "converted", tmp_path / "back", "hub", trained_on=native)


PARTS = {"both": EXPERTS, "gate and up": EXPERTS[:1], "down": EXPERTS[1:], "attention only": []}
BY_LAYER = {"each layer another": ["layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    "family, part",
    [*crossed(FAMILIES, PARTS, everywhere=1), *(("qwen3_moe", part) for part in BY_LAYER)],
)
def test_an_adapter_trained_on_the_hub_layout_is_converted_with_it(family, part, tmp_path):
    adapted, native = adapted_in("hub", family, tmp_path, {**PARTS, **BY_LAYER}[part]), tmp_path / "native"
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", base_model=str(native))
    assert_serves_and_merges(adapted, tmp_path)
    assert relative_error(logits_of(adapted), logits_of(load(native))) > 0.05, "it does something"
    assert same_bits(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "adapter"))


@every_family
def test_an_adapter_trained_on_the_native_layout_serves_the_hub_layout(family, tmp_path):
    adapted = adapted_in("native", family, tmp_path)
    convert_adapter(tmp_path / "adapter", tmp_path / "converted", "hub")
    model = PeftModel.from_pretrained(load(tmp_path / "hub"), tmp_path / "converted")
    assert relative_error(logits_of(model), logits_of(adapted)) < 1e-5, SUMS
    theirs = engine_adapters.merge_by_peft(model, tmp_path / "merged hub")
    engine_adapters.merge_by_peft(adapted, tmp_path / "merged native")
    sonicmoe_hf.convert_checkpoint(tmp_path / "merged native", tmp_path / "merged back", "hub")
    assert_all_close(tensors_in(tmp_path / "merged back"), theirs, 1e-6, "fp32: the product of A and B in two orders")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_lora_on_native_experts_trains_with_token_rounding(family, tmp_path):
    native = native_twin(build(family), tmp_path)
    sonicmoe_hf.patch_model(native, POLICY)
    model = get_peft_model(native, lora(native, NATIVE_EXPERTS)).train()
    watch = Watch(model)
    losses = []
    for _ in range(5):
        found = loss_and_gradients(model, batch())
        losses.append(found["loss"].item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * parameter.grad
    assert losses[-1] < losses[0] and all(watch.rounded())
    assert sum("experts" in name and "lora" in name for name in found) == 2 * 2 * 2, "A and B, two weights, two layers"


def test_peft_s_shorthands_reach_linear_layers_only(tmp_path):
    """PEFT extends them to experts by a table of Transformers' own model types (docs/layout.md)."""
    native = native_twin(build("qwen3_moe"), tmp_path)
    adapted = get_peft_model(native, LoraConfig(r=2, target_modules="all-linear"))
    names = {name for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names and all("self_attn" in name for name in names)


@every_family
def test_a_hub_adapter_on_a_native_model_is_refused(family, tmp_path):
    adapted_in("hub", family, tmp_path)
    model, adapter = load(tmp_path / "native"), str(tmp_path / "adapter")
    for use, words in (
        (lambda: PeftModel.from_pretrained(load(tmp_path / "native"), adapter), "another order"),
        (lambda: model.load_adapter(adapter), "no place in the native layout"),
    ):
        with pytest.raises(CheckpointError, match=words), pytest.warns(RuntimeWarning):
            use()


@every_family
@pytest.mark.parametrize("attached", rest_pinned(["native", "hub"]))
def test_bare_weights_of_the_other_layouts_adapter_do_not_fit_an_attached_one(family, attached, tmp_path):
    """A Trainer run that resumes across layouts gives PEFT the weights alone."""
    adapted_in("hub" if attached == "native" else "native", family, tmp_path)
    model = load(tmp_path / attached)
    model = get_peft_model(model, lora(model, PARAMETERS[attached]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_adapter(tmp_path / "adapter", "default")


@every_family
def test_a_native_adapter_on_a_hub_model_is_never_applied_to_the_experts(family, tmp_path):
    adapted_in("native", family, tmp_path)
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        model = PeftModel.from_pretrained(load(tmp_path / "hub"), tmp_path / "adapter")
    assert not [name for name, _ in model.named_parameters() if ".experts." in name and "lora" in name]


@pytest.fixture
def adapter(tmp_path):
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r".*\.gate_up_proj": 8}}
    adapted_in("hub", "qwen3_moe", tmp_path, **patterns)
    return tmp_path / "adapter"


def test_ranks_and_alphas_named_for_a_parameter_follow_it(adapter, tmp_path):
    convert_adapter(adapter, tmp_path / "converted")
    config = adapter_config(tmp_path / "converted")
    assert config["rank_pattern"] == {"experts.c_fc": 4} and config["alpha_pattern"] == {"experts.c_fc": 8}
    assert config["target_parameters"] == ["experts.c_fc", "experts.c_proj"]
    assert config["base_model_name_or_path"] is None


PATTERNS = [
    {"gate_up_proj$": 4},
    {r".*experts\.(gate_up_proj|down_proj)": 4},
    {r"layers\.1\..*gate_up_pro.": 4, "mlp.experts.*": 3, "q_a_proj": 1},
    {"down_proj": 4},
    {r".*\.layers\.1\..*up_proj": 3, "model.layers.1.mlp.experts.down_proj": 4},
]


@pytest.mark.pinned
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_ranks_and_alphas_of_any_regular_expression_stay_with_their_weights(pattern, tmp_path):
    options = {"rank_pattern": pattern, "alpha_pattern": {name: 5 * value for name, value in pattern.items()}}
    modules = ["q_a_proj", "mlp.down_proj", "shared_experts.down_proj"]  # of the first layer and of the shared experts
    adapted = adapted_in("hub", "deepseek_v3", tmp_path, target_modules=modules, **options)
    convert_adapter(tmp_path / "adapter", tmp_path / "converted")
    assert_serves_and_merges(adapted, tmp_path)
    model = PeftModel.from_pretrained(load(tmp_path / "hub"), tmp_path / "back")
    assert torch.equal(logits_of(model), logits_of(adapted))


@every_family
def test_the_experts_own_rank_goes_through_conversion_and_merging_and_comes_back(family, tmp_path):
    hub, _ = save_both(build(family), tmp_path)
    model = load(hub)
    adapted = random_factors(get_peft_model(model, sonicmoe_hf.lora_config(model, 4, experts_r=2))).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    convert_adapter(tmp_path / "adapter", tmp_path / "converted")
    assert adapter_config(tmp_path / "converted")["rank_pattern"] == {"experts.c_fc": 2, "experts.c_proj": 2}
    assert_serves_and_merges(adapted, tmp_path)
    assert same_bits(tensors_in(tmp_path / "adapter"), tensors_in(tmp_path / "back"))
    assert adapter_config(tmp_path / "back")["alpha_pattern"] == adapter_config(tmp_path / "adapter")["alpha_pattern"]


@every_family
def test_either_layout_of_the_base_tells_where_an_adapter_belongs(family, tmp_path):
    adapted_in("hub", family, tmp_path)
    for layout in ("native", "hub"):
        for base in ("hub", "native"):
            convert_adapter(tmp_path / "adapter", tmp_path / f"{layout} by {base}", layout, trained_on=tmp_path / base)
        assert same_bits(*(tensors_in(tmp_path / f"{layout} by {base}") for base in ("hub", "native")))
    assert same_bits(tensors_in(tmp_path / "hub by native"), tensors_in(tmp_path / "adapter"))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_factors_that_are_not_finite_are_refused(value, adapter):
    name = next(name for name in tensors_in(adapter) if "experts.lora_B" in name)
    edit_tensors(adapter, lambda tensors: tensors[name][1, 2].fill_(value))
    assert_refused(adapter, f"{re.escape(name)} has NaN or infinite values.*; take an earlier checkpoint")


def test_empty_factors_as_zero_3_saves_them_are_refused_with_what_saves_them(adapter):
    edit_tensors(adapter, lambda tensors: tensors.update({name: torch.empty(0) for name in tensors}))
    assert_refused(adapter, "are empty, as DeepSpeed's ZeRO-3 leaves them.*stage3_gather_16bit_weights_on_model_save")


def test_weights_and_states_of_the_old_layout_stay_behind(adapter, tmp_path):
    for name in ("adapter_model.bin", "optimizer.pt", "notes.txt"):
        (adapter / name).write_text("old")
    convert_adapter(adapter, tmp_path / "converted")
    carried = {path.name for path in (tmp_path / "converted").iterdir()}
    assert "notes.txt" in carried and not carried & {"adapter_model.bin", "optimizer.pt"}


@pytest.mark.pinned
def test_the_model_that_it_was_trained_on_must_be_read(adapter):
    assert_refused(adapter, "trained on cannot be read; say trained_on=", trained_on="nobody/nothing")
    edit_adapter_config(adapter, base_model_name_or_path=None)
    assert_refused(adapter, "names no base model")


@pytest.mark.pinned
def test_the_base_models_name_stays_where_its_layout_does_and_another_can_be_given(adapter, tmp_path):
    def named(source, folder, *options):
        assert main(["convert", str(source), str(tmp_path / folder), *options]) == 0
        return adapter_config(tmp_path / folder)["base_model_name_or_path"]

    own = adapter_config(adapter)["base_model_name_or_path"]
    assert own and named(adapter, "vllm", "--layout", "vllm") == own
    assert named(tmp_path / "vllm", "back", "--layout", "hub") == own, "without --trained-on"
    assert named(adapter, "published", "--layout", "hub", "--base-model", "org/name") == "org/name"
    assert named(adapter, "to native", "--layout", "native") is None, "whose experts have other names"
    edit_adapter_config(adapter, base_model_name_or_path=None)
    assert named(adapter, "unnamed", "--layout", "hub", "--trained-on", own) == own


def test_the_command_converts_adapters(adapter, tmp_path, capsys):
    template = adapter / "chat_templates" / "tools.jinja"  # as a tokenizer with several saves them
    template.parent.mkdir()
    template.write_text("{{ messages }}")
    assert main(["convert", str(adapter), str(tmp_path / "converted"), "--layout", "native"]) == 0
    assert "the adapter in the native layout" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "converted" / "README.md").exists()
    assert (tmp_path / "converted" / "chat_templates" / "tools.jinja").read_text() == template.read_text()
    assert main(["convert", str(adapter), str(tmp_path / "converted"), "--layout", "native"]) == 2
    back = ["convert", str(tmp_path / "converted"), str(tmp_path / "back"), "--layout", "hub"]
    assert main(back) == 2, "it says no base model"
    assert "say trained_on=" in capsys.readouterr().err
    assert main([*back, "--trained-on", str(tmp_path / "native")]) == 0


def test_the_command_verifies_adapters_and_refuses_options_that_are_for_models_or_for_adapters(
    adapter, tmp_path, capsys
):
    native = ["--layout", "native"]
    arguments = ["convert", str(adapter), str(tmp_path / "converted"), *native]
    options = ("--dtype float32", "--max-shard-size 5GB", "--dequantize", "--no-dequantize", "--quantize nf4")
    for option in (*options, "--revision main"):
        assert main([*arguments, *option.split()]) == 2
        assert "is for models, but" in capsys.readouterr().err
        assert not (tmp_path / "converted").exists()
    assert main([*arguments, "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    model = ["convert", str(tmp_path / "hub"), str(tmp_path / "model"), *native, "--trained-on", str(tmp_path / "hub")]
    assert main(model) == 2
    assert "--trained-on is for adapters" in capsys.readouterr().err


def test_without_peft_adapters_are_converted(adapter, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # what an environment without it raises: ModuleNotFoundError
    convert_adapter(adapter, tmp_path / "converted")
