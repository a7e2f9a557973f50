"""The registered model classes of the native layout: they train, save, load and refuse as models should."""

import pickle
from functools import partial

import pytest
import torch
from helpers.marks import rest_pinned
from helpers.models import (
    CONFIGS,
    ON_DISK,
    ORDER_OF_SUMS,
    assert_all_close,
    batch,
    build,
    loss_and_gradients,
    patching,
    relative_error,
    twin,
)
from helpers.native import in_native_names, native_twin, save_both
from helpers.training import CHECKPOINTING, POLICY, Examples, Watch, arguments, checkpoint_layers
from helpers.trl_trainers import trl_trainer, word_tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, pipeline
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY
from trl import SFTConfig, SFTTrainer

import sonicmoe_hf
from sonicmoe_hf import CheckpointError, SonicMoEExperts, TokenRoundingCallback, convert_checkpoint
from sonicmoe_hf.checkpoints.modeling import NATIVE
from sonicmoe_hf.patching.moe_layers import find_layers, is_patched

FAMILIES = list(CONFIGS)
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def folders(tmp_path):
    """Write a small Qwen3-MoE: in the hub's layout and in the native one."""
    return save_both(build("qwen3_moe"), tmp_path)


def from_scratch(family, **changes):
    """Build a native model with random weights, from its config alone."""
    entries = CONFIGS[family](**changes).to_dict()
    for key in ("model_type", "architectures", "transformers_version"):
        entries.pop(key)
    return AutoModelForCausalLM.from_config(NATIVE[family].config(**entries))


@every_family
def test_the_auto_classes_load_a_native_checkpoint(family, tmp_path):
    _, folder = save_both(build(family), tmp_path)
    assert type(AutoConfig.from_pretrained(folder)) is NATIVE[family].config
    assert type(AutoModel.from_pretrained(folder)) is NATIVE[family].model
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is NATIVE[family].causal_lm and type(model.model) is NATIVE[family].model
    assert model.loss_type == "ForCausalLM"
    assert {type(layer.experts) for layer in find_layers(model)} == {SonicMoEExperts}


@every_family
def test_logits_loss_and_every_gradient_equal_the_familys_own(family, tmp_path):
    model = build(family)
    native = native_twin(model, tmp_path)
    expected = in_native_names(loss_and_gradients(model, batch(padding=True)), family)
    assert_all_close(loss_and_gradients(native, batch(padding=True)), expected, 1e-5, ORDER_OF_SUMS)


@every_family
@pytest.mark.parametrize("kind", rest_pinned([None, *CHECKPOINTING]))
def test_token_rounding_trains_as_on_the_patched_hub_model(family, kind, tmp_path):
    model = build(family)
    native = native_twin(model, tmp_path)
    for each in (model, native):
        assert {layer.reason for layer in sonicmoe_hf.patch_model(each, POLICY).layers} == {"fully supported"}
        checkpoint_layers(each, kind)
    watch = Watch(native)
    expected = in_native_names(loss_and_gradients(model, batch()), family)
    assert_all_close(loss_and_gradients(native, batch()), expected, 1e-5, ORDER_OF_SUMS)
    assert all(watch.rounded())
    sonicmoe_hf.unpatch_model(native)
    assert not is_patched(native)
    loss_and_gradients(native, batch())
    assert not any(watch.rounded())


def test_router_logits_are_recorded_in_the_first_native_model_of_a_process():
    _CAN_RECORD_REGISTRY.pop(str(NATIVE["qwen3_moe"].model), None)
    model = from_scratch("qwen3_moe")
    outputs = model(**batch(), output_router_logits=True)
    assert len(outputs.router_logits) == len(model.model.layers) and outputs.aux_loss > 0


def test_patch_catches_native_models_too(folders):
    _, folder = folders
    with patching("qwen3_moe", routing=POLICY):
        loaded, made = AutoModelForCausalLM.from_pretrained(folder), from_scratch("qwen3_moe")
    for model in (loaded, made):
        watch = Watch(model)
        loss_and_gradients(model.train(), batch())
        assert is_patched(model) and watch.rounded() == [True, True]
    assert is_patched(sonicmoe_hf.from_pretrained(folder, routing="token_rounding"))


@every_family
def test_new_models_start_as_the_familys_own_do(family):
    torch.manual_seed(0)
    model = from_scratch(family, initializer_range=0.3)
    for layer in find_layers(model):
        assert layer.experts.c_fc.std().item() == pytest.approx(0.3, rel=0.05)
        assert layer.experts.c_proj.std().item() == pytest.approx(0.3, rel=0.05)
        assert layer.experts.c_fc.mean().abs() < 0.03
        if family == "gpt_oss":
            assert not layer.experts.c_fc_bias.any() and not layer.experts.c_proj_bias.any()
    with torch.device("meta"):
        model = from_scratch(family)
    model.to_empty(device="cpu")
    model.init_weights()
    assert all(layer.experts.c_fc.isfinite().all() for layer in find_layers(model))


@every_family
@pytest.mark.parametrize("original", rest_pinned([True, False]))
def test_models_save_natively_whatever_save_original_format_says(family, original, tmp_path):
    native = native_twin(build(family), tmp_path)
    native.save_pretrained(tmp_path / "saved", save_original_format=original)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again) is type(native)
    assert_all_close(again.state_dict(), native.state_dict(), 0.0, "files keep every bit")
    fresh = from_scratch(family)
    fresh.save_pretrained(tmp_path / "fresh", save_original_format=original)
    convert_checkpoint(tmp_path / "fresh", tmp_path / "fresh hub", "hub")
    hub = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh hub")
    assert_all_close(in_native_names(hub.state_dict(), family), fresh.state_dict(), 0.0, "moved, not changed")


def test_native_classes_refuse_a_hub_checkpoint_and_name_the_command(folders):
    hub, native = folders
    classes = NATIVE["qwen3_moe"]
    of_native = partial(AutoModelForCausalLM.from_pretrained, config=AutoConfig.from_pretrained(native))
    for load, words in (
        *(
            (kind.from_pretrained, "model_type 'qwen3_moe'")
            for kind in (classes.causal_lm, classes.model, classes.config)
        ),
        (of_native, "has no model.layers.0.mlp.experts.c_fc"),
    ):
        with pytest.raises(CheckpointError, match=rf"{words}.*sonicmoe-hf convert"):
            load(hub)


def test_state_dicts_of_the_other_layout_are_refused(folders):
    model, native = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    with pytest.raises(CheckpointError, match="rows stand in another order"):
        native.load_state_dict(model.state_dict(), strict=False)
    _, info = type(model).from_pretrained(folders[1], output_loading_info=True)
    assert any("gate_up_proj" in name for name in info["missing_keys"])
    assert any("c_fc" in name for name in info["unexpected_keys"])


def test_another_layout_version_is_refused():
    with pytest.raises(CheckpointError, match="sonicmoe_layout_version is 2"):
        NATIVE["olmoe"].config.from_dict({"model_type": "sonicmoe_olmoe", "sonicmoe_layout_version": 2})


def test_other_experts_implementations_raise_and_are_named(folders):
    _, folder = folders
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="sonicmoe_hf")
    assert model.config._experts_implementation == "sonicmoe_hf"
    for choose in (partial(AutoModelForCausalLM.from_pretrained, folder), model.set_experts_implementation):
        with pytest.raises(ValueError, match=r'experts_implementation is "eager".*--layout hub'):
            choose(experts_implementation="eager")
    model.set_experts_implementation("sonicmoe_hf")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_device_maps_place_and_offload_layers(family, tmp_path):
    model = build(family).eval()
    _, folder = save_both(model, tmp_path)
    native = AutoModelForCausalLM.from_pretrained(folder, device_map=ON_DISK, offload_folder=tmp_path / "offload")
    assert next(layer for layer in find_layers(native) if "layers.1" in layer.name).experts.c_fc.is_meta
    with torch.no_grad():
        assert relative_error(native(**batch()).logits, model(**batch()).logits) < 1e-5, ORDER_OF_SUMS
    automatic = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": 100_000}, offload_folder=tmp_path / "offload"
    )
    assert set(automatic.hf_device_map.values()) == {"cpu", "disk"}
    assert not [name for name in automatic.hf_device_map if name.count(".") > 2], "no layer is split"


@every_family
def test_copies_and_pickles_are_models_of_their_own(family, tmp_path):
    native = native_twin(build(family), tmp_path)
    sonicmoe_hf.patch_model(native, POLICY)
    expected = loss_and_gradients(native, batch())
    for copied in (twin(native), pickle.loads(pickle.dumps(native))):
        assert_all_close(loss_and_gradients(copied, batch()), expected, 0.0, "the same operations")


def test_label_smoothing_shifts_labels_as_for_the_familys_own(tmp_path):
    model = build("olmoe")
    losses = []
    for each in (model, native_twin(model, tmp_path)):
        options = arguments(tmp_path, max_steps=1, label_smoothing_factor=0.1)
        trainer = Trainer(each, options, train_dataset=Examples(4))
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_parallel_plans_name_the_native_weights():
    for family, classes in NATIVE.items():
        plan = classes.config.base_model_ep_plan
        assert plan["layers.*.mlp.experts.c_fc"] == plan["layers.*.mlp.experts.c_proj"] == "grouped_gemm", family
        for plan in (classes.config.base_model_tp_plan or {}, classes.config.base_model_ep_plan):
            assert not [name for name in plan if "experts.gate_up" in name or name.endswith("mlp.experts.down_proj")]
    assert NATIVE["qwen3_moe"].config.base_model_tp_plan["layers.*.mlp.experts.c_fc"] == "colwise", (
        "pairs stay together"
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_it_compiles_without_graph_breaks(family, tmp_path):
    native = native_twin(build(family), tmp_path)
    expected = loss_and_gradients(native, batch())["logits"]
    torch.compiler.reset()
    actual = torch.compile(native, backend="aot_eager", fullgraph=True)(**batch()).logits
    assert relative_error(actual.detach(), expected) < 1e-5, "fp32: the compiler reorders"


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_a_bf16_native_model_keeps_what_the_family_keeps_in_fp32(family, tmp_path):
    _, folder = save_both(build(family), tmp_path)
    native = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    hub = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.bfloat16)
    ours = {name: tensor.dtype for name, tensor in native.state_dict().items()}
    theirs = {name: tensor.dtype for name, tensor in in_native_names(hub.state_dict(), family).items()}
    assert ours == theirs


def test_trl_and_pipelines_load_a_native_checkpoint_by_its_name(folders, tmp_path):
    _, folder = folders
    word_tokenizer().save_pretrained(folder)
    assert pipeline("text-generation", str(folder))("w4 w5", max_new_tokens=2)[0]["generated_text"].startswith("w4 w5")
    rows = [{"text": "w4 w5 w6 w7 w8 w9"}] * 16
    callbacks = [TokenRoundingCallback(tile=2, min_tiles_per_expert=0)]
    config = {"max_steps": 2, "max_length": 16, "per_device_train_batch_size": 8}
    trainer = trl_trainer(SFTTrainer, SFTConfig, str(folder), rows, tmp_path, None, callbacks, config)
    trainer.train()
    assert type(trainer.model) is NATIVE["qwen3_moe"].causal_lm and is_patched(trainer.model)
