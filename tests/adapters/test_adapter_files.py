"""Adapter files of other trainers are read as they were meant; files that lack parts raise errors with their names."""

import re

import pytest
import torch
from helpers.adapters import EXPERTS, adapt, save_with_factors
from helpers.checkpoints import edit_tensors, make, rewrite, same_bits, tensors_in
from helpers.engine_adapters import adapter_config, edit_adapter_config, save_base
from helpers.small_families import small_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from sonicmoe_hf import CheckpointError, convert_adapter, merge_adapter

pytestmark = pytest.mark.pinned
PREFIX = "base_model.model."


@pytest.fixture
def adapter(tmp_path):
    """Write an adapter of all experts and two linear layers, beside its base."""
    adapt(save_base("qwen3_moe", tmp_path / "base"), tmp_path / "adapter")
    return tmp_path / "adapter"


def merged(adapter, name):
    merge_adapter(adapter.parent / "base", adapter, adapter.parent / name)
    return tensors_in(adapter.parent / name)


def assert_read_as(expected, adapter):
    """Check that merging gives the tensors `expected`, and converting what has a meaning of its own no more."""
    assert same_bits(merged(adapter, "merged"), expected)
    convert_adapter(adapter, adapter.parent / "converted", "hub")
    assert same_bits(merged(adapter.parent / "converted", "merged converted"), expected)


# the order of lora_B's columns


def group_by_expert(adapter, num_experts=8):
    """Order lora_B's columns of experts as Unsloth's older trainers did."""
    for name, tensor in (tensors := tensors_in(adapter)).items():
        if ".experts." in name and "lora_B" in name:
            tensors[name] = tensor.unflatten(1, (-1, num_experts)).transpose(1, 2).flatten(1).contiguous()
    rewrite(adapter, tensors)


DETAIL = {"gate_up_proj": {"lora_B_layout": "grouped_by_expert"}, "down_proj": {"lora_B_layout": "grouped_by_expert"}}
OLD = {"auto_mapping": {"base_model_class": "PeftModel", "unsloth_fixed": True}}
MARKED = {"lora_B_layout": "grouped_by_expert"}


@pytest.mark.parametrize(
    "family, grouped, entries",
    [
        ("qwen3_moe", False, {}),
        ("qwen3_moe", True, OLD),
        ("gpt_oss", True, OLD),
        ("olmoe", False, OLD),  # which Unsloth left to PEFT
        ("qwen3_moe", False, {**OLD, "lora_B_layout": "rank_major"}),
        ("qwen3_moe", True, {**OLD, **MARKED}),
        ("olmoe", True, MARKED),
        ("qwen3_moe", True, {"auto_mapping": {"unsloth_fixed": True, **MARKED}}),
        ("qwen3_moe", True, {"unsloth_fused_expert_lora": {"parameters": DETAIL}}),
    ],
    ids=str,
)
def test_columns_are_read_in_the_order_that_unsloth_writes_down(family, grouped, entries, tmp_path):
    adapter = tmp_path / "adapter"
    adapt(save_base(family, tmp_path / "base"), adapter)
    expected, before = merged(adapter, "expected"), tensors_in(adapter)
    if grouped:
        group_by_expert(adapter)
    edit_adapter_config(adapter, **entries)
    assert_read_as(expected, adapter)
    assert same_bits(tensors_in(tmp_path / "converted"), before), "in PEFT's own order"
    assert not [text for text in ("lora_B_layout", "unsloth") if text in str(adapter_config(tmp_path / "converted"))]


def test_an_order_that_is_not_known_is_refused(adapter):
    parameters = {**DETAIL, "down_proj": {"lora_B_layout": "mixed"}}
    edit_adapter_config(adapter, unsloth_fused_expert_lora={"parameters": parameters})
    with pytest.raises(CheckpointError, match="lora_B_layout of down_proj is 'mixed'"):
        merged(adapter, "merged")


# names that wrappers changed


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."),
        lambda name: f"module.{name}",
        lambda name: name.replace(PREFIX, f"{PREFIX}module."),
        lambda name: re.sub(r"(layers\.\d+)\.", r"\1._orig_mod.", name),
        lambda name: re.sub(r"(lora_[AB])\.", r"\1.default.", name),
        lambda name: re.sub(r"(layers\.\d+)\.", r"\1._fsdp_wrapped_module._checkpoint_wrapped_module.", name),
    ],
    ids=["compiled", "DDP", "DDP inside", "compiled layers", "the model's state", "FSDP and checkpointing"],
)
def test_what_wrappers_add_to_names_is_left_out(rename, adapter):
    targets = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in EXPERTS]
    edit_adapter_config(adapter, target_parameters=targets)
    expected = merged(adapter, "expected")
    edit_adapter_config(adapter, target_parameters=[rename(PREFIX + target).replace(PREFIX, "") for target in targets])
    rewrite(adapter, {rename(name): tensor for name, tensor in tensors_in(adapter).items()})
    assert_read_as(expected, adapter)


def test_one_name_twice_is_refused(adapter):
    name = next(iter(tensors_in(adapter)))
    edit_tensors(adapter, {f"module.{name}": tensors_in(adapter)[name].clone()})
    with pytest.raises(CheckpointError, match="which are one name"):
        merged(adapter, "merged")


@pytest.mark.parametrize("name", ["w1", "gate_up_projs.3", "0.w9"])
def test_names_that_nobody_knows_raise_with_names_that_would_do(name, adapter):
    """PEFT does not know them either, and would merge the base."""
    edit_adapter_config(adapter, target_parameters=None, target_modules=[])
    stem = f"{PREFIX}model.layers.0.mlp.experts.{name}"
    rewrite(adapter, {f"{stem}.lora_A.weight": torch.ones(2, 32), f"{stem}.lora_B.weight": torch.ones(16, 2)})
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.lora_A|gate_proj, w1, up_proj, w3") as raised:
        merged(adapter, "merged")
    assert "merge_and_unload" not in str(raised.value)


# files that lack parts


def assert_lacking(adapter, match):
    for layout in ("native", "hub", "vllm", None):
        with pytest.raises(CheckpointError, match=match):
            if layout is None:
                merged(adapter, "refused")
            else:
                convert_adapter(adapter, adapter.parent / "refused", layout, trained_on=adapter.parent / "base")


def remove(adapter, pattern):
    names = [name for name in tensors_in(adapter) if re.search(pattern, name)]
    assert names
    edit_tensors(adapter, dict.fromkeys(names))


EXPERTS_OF_0, QUERY = "layers.0.mlp.experts", "no lora_A of model.layers.1.self_attn.q_proj.weight, "


@pytest.mark.parametrize(
    "form, pattern, match",
    [
        ("adapter", "layers.1.", f"{QUERY}model.layers.1.self_attn.o_proj.weight, "),
        ("adapter", f"{EXPERTS_OF_0}.", f"lora_A of model.{EXPERTS_OF_0}.gate_up_proj, .*down_proj, though"),
        ("adapter", f"{EXPERTS_OF_0}.base_layer", f"lora_A of model.{EXPERTS_OF_0}.gate_up_proj, though"),
        ("adapter", "layers.1.self_attn.q_proj.lora_A", f"{QUERY}though"),
        ("adapter", "layers.1.mlp.experts.lora_B", "lora_B of model.layers.1.mlp.experts.down_proj, though"),
        ("served", "layers.1.", rf"{QUERY}.* and \d+ more"),
        ("served", r"experts\.[4-7]\.", f"{EXPERTS_OF_0}.4.gate_proj.weight, .* and 20 more"),
        ("served", r"experts\.\d\.down_proj", f"{EXPERTS_OF_0}.0.down_proj.weight, .* and 12 more"),
        ("served", f"{EXPERTS_OF_0}.3.up_proj.lora_B", f"lora_B of model.{EXPERTS_OF_0}.3.up_proj.weight,"),
    ],
)
def test_factors_that_are_missing_are_named(form, pattern, match, adapter):
    """Factors of fused experts, layers and single experts: one rank's, as a trainer with expert parallelism may save
    them; one projection; one layer."""
    if form == "served":
        convert_adapter(adapter, adapter.parent / form, "vllm")
    remove(adapter.parent / form, pattern)
    assert_lacking(adapter.parent / form, match)


def test_whole_modules_that_are_missing_are_named(tmp_path):
    model = save_base("qwen3_moe", tmp_path / "base")
    adapt(model, tmp_path / "adapter", modules_to_save=["lm_head"])
    remove(tmp_path / "adapter", "lm_head")
    for write in (
        merge_adapter,
        lambda base, adapter, to: convert_adapter(adapter, to, "hub", trained_on=base),
    ):
        with pytest.raises(CheckpointError, match=r"has no lm_head.weight, though"):
            write(tmp_path / "base", tmp_path / "adapter", tmp_path / "refused")


def test_whole_experts_that_were_trained_are_left_to_peft(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mlp"])
    save_with_factors(get_peft_model(save_base("qwen3_moe", tmp_path / "base"), config), tmp_path / "adapter")
    assert_lacking(
        tmp_path / "adapter", r"experts.* nor the weight of a single layer.*merge_and_unload|modules_to_save is"
    )


def test_the_head_of_a_classifier_that_is_missing_is_named(tmp_path):
    make(tmp_path / "causal", "qwen3_moe", dtype=torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=3)
    model.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["q_proj"], target_parameters=EXPERTS)
    save_with_factors(get_peft_model(model, config), tmp_path / "adapter")
    assert not torch.equal(
        merged(tmp_path / "adapter", "merged")["score.weight"], tensors_in(tmp_path / "base")["score.weight"]
    )
    remove(tmp_path / "adapter", "score")
    with pytest.raises(CheckpointError, match=r"has no score.weight, though"):
        merged(tmp_path / "adapter", "refused")


CHOSEN = r".*\.experts\.[03]\.(gate|up|down)_proj"


@pytest.mark.parametrize(
    "kept, entries",
    [
        (r"experts\.[03]\.", {"target_modules": CHOSEN}),
        (
            r"experts\.[03]\.",
            {"target_modules": [f"experts.{e}.{p}_proj" for e in (0, 3) for p in ("gate", "up", "down")]},
        ),
        (
            r"experts\.[0-5]\.",
            {"target_modules": ["gate_proj", "up_proj", "down_proj"], "exclude_modules": r".*experts\.[67]\..*"},
        ),
        (r"layers\.1\.mlp", {"target_modules": ["gate_proj", "up_proj", "down_proj"], "layers_to_transform": 1}),
        (
            r"layers\.1\..*down_proj",
            {"target_modules": ["down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        ),
        (r"q_proj", {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["self_attn.o_proj"]}),
    ],
)
def test_a_subset_that_the_config_describes_is_merged(kept, entries, adapter):
    convert_adapter(adapter, adapter.parent / "served", "vllm", base_model=str(adapter.parent / "base"))
    before, whole = tensors_in(adapter.parent / "base"), merged(adapter.parent / "served", "whole")
    remove(adapter.parent / "served", f"^(?!.*{kept})")
    edit_adapter_config(adapter.parent / "served", **entries)
    some = merged(adapter.parent / "served", "some")
    for name in before:
        expected = (whole if re.search(kept, name) else before)[name]
        assert torch.equal(some[name], expected), name
    assert not same_bits(some, before)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "mixtral", "jamba"])
def test_peft_s_own_narrowing_is_read_as_peft_means_it(family, tmp_path):
    """A vision tower, other names in the hub's checkpoint, layers of two kinds."""
    model = small_model(family)
    model.save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "k_proj"],
        layers_to_transform=[0, 1],
        exclude_modules=["k_proj"],
        layers_pattern="layers",
    )
    save_with_factors(get_peft_model(model, config), tmp_path / "adapter")
    merged(tmp_path / "adapter", "merged")
    remove(tmp_path / "adapter", "q_proj")
    with pytest.raises(CheckpointError, match=r"has no lora_A of .*q_proj|has no weights"):
        merged(tmp_path / "adapter", "refused")
