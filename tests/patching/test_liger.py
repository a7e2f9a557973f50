"""Liger's kernels beside ours, with the real package: its RMSNorm, RoPE and fused loss, and our experts.

Most of its kernels need a GPU. What runs here: the experts alone; whole models where Liger replaces nothing but experts;
and in a process of its own, by Triton's interpreter, RoPE and the fused loss too (not RMSNorm, whose kernel Triton
3.7 cannot interpret: that its forward is bound is all these tests say of it).
"""

import copy
import importlib
import sys

import accelerate
import pytest
import torch
from helpers.adapters import with_lora
from helpers.marks import rest_slow
from helpers.models import (
    GROUPED,
    IN_GROUPS,
    OF_64,
    OF_QWEN3,
    ORDER_OF_SUMS,
    ROPE,
    SHARED,
    assert_all_close,
    batch,
    build,
    build_patched,
    loss_and_gradients,
    patching,
    relative_error,
    twin,
    with_realistic_weights,
)
from helpers.programs import run_python
from helpers.training import TILE, Watch, logs_of, run_trainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.checkpoints.modeling import NATIVE
from sonicmoe_hf.patching.forwards import INTERFACE_CODE, is_bound_by_liger
from sonicmoe_hf.patching.moe_layers import find_layers

liger = pytest.importorskip("liger_kernel.transformers")
output_classes = importlib.import_module("liger_kernel.transformers.model.output_classes")
FAMILIES = ["qwen3_moe", "deepseek_v3"]
OF_TEXT = [*FAMILIES, "mixtral", "deepseek_v2", "hunyuan_v1_moe", "qwen3_next"]  # whose experts Liger replaces
OF_IMAGES = {  # likewise: what of Transformers' Liger 0.8.5 imports
    "qwen3_vl_moe": "LigerQwen3VLMoeCausalLMOutputWithPast",
    "qwen3_5_moe": "LigerQwen3_5MoeCausalLMOutputWithPast",
    "glm4v_moe": "LigerGlm4vMoeCausalLMOutputWithPast",
}
SIZES = {  # of any of these: what a config does not know it keeps unread
    **SHARED, **GROUPED, **OF_QWEN3, **IN_GROUPS, "num_key_value_heads": 4, "num_local_experts": 8,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_topk": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "full_attention_interval": 2, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]},
}  # fmt: skip
OF_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
EXPERTS_ALONE = {"rope": False, "rms_norm": False, "fused_linear_cross_entropy": False}  # what can run on a CPU
ORDERS = ["Liger, then patched", "patched, then Liger"]


@pytest.fixture(autouse=True)
def transformers_afterwards_as_before():
    names = [*OF_TEXT, *OF_IMAGES]
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in names]
    before = [dict(vars(module)) for module in modules]
    yield
    for module, names in zip(modules, before):
        vars(module).update(names)


def apply_liger(model, **switches):
    liger._apply_liger_kernel_to_instance(model=model, **switches)


def apply_both(model, order, routing=None, **switches):
    if order == "Liger, then patched":
        apply_liger(model, **switches)
        sonicmoe_hf.patch_model(model, routing)
    else:
        sonicmoe_hf.patch_model(model, routing)
        apply_liger(model, **switches)
    return model


def is_ours(experts):
    return "forward" not in vars(experts) and type(experts).forward.__code__ is INTERFACE_CODE


def is_ligers(module):
    return module.forward.__func__.__module__.startswith("liger_kernel.")


class _ReachedTheFirstLayer(Exception):
    pass


def begin_a_call(model):
    """Call the model up to its first layer, short of the kernels that need a GPU."""

    def stop(layer, args, kwargs):
        raise _ReachedTheFirstLayer

    hook = model.model.layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    with hook, pytest.raises(_ReachedTheFirstLayer):
        model(**batch())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_liger_keeps_its_norms_and_loss_and_we_our_experts(family, order):
    model = build(family)
    alone = twin(next(find_layers(model)).experts)
    apply_both(model, order)
    begin_a_call(model)
    assert is_ligers(model), "the fused linear cross entropy"
    assert is_ligers(model.model.norm) and all(is_ligers(layer.input_layernorm) for layer in model.model.layers)
    if family == "qwen3_moe":
        module = sys.modules[type(model).__module__]
        assert module.apply_rotary_pos_emb.__module__.startswith("liger_kernel.")
    else:
        assert is_ligers(model.model.layers[1].mlp.shared_experts)
    layers = list(find_layers(model))
    assert layers and all(is_ours(layer.experts) and type(layer.experts).__name__ in str(model) for layer in layers)
    assert all(layer.accelerated for layer in sonicmoe_hf.supports(model))
    x, index = torch.randn(20, 32), torch.stack([torch.randperm(8)[:2] for _ in range(20)])
    arguments = (x, index, torch.rand(20, 2))
    assert relative_error(layers[0].experts(*arguments), alone(*arguments)) < 1e-5  # fp32: another order of sums


def test_experts_that_liger_replaces_again_and_again_are_ours_at_the_next_call():
    model = build_patched("qwen3_moe")
    expected = loss_and_gradients(model, batch())
    for _ in range(2):  # Liger's own forward needs a GPU: any call of it would fail
        apply_liger(model, **EXPERTS_ALONE)
        assert_all_close(loss_and_gradients(model, batch()), expected, 1e-5, ORDER_OF_SUMS)
        assert all(is_ours(layer.experts) for layer in find_layers(model))


def small(family):
    """Build a model with experts of one of the families that Liger knows."""
    sizes = copy.deepcopy(SIZES)  # configs write their own kind of RoPE into what they are given
    of_images = {"text_config": sizes, "vision_config": OF_VISION}
    config = AutoConfig.for_model(family, **(of_images if family in OF_IMAGES else sizes))
    auto_class = AutoModelForImageTextToText if family in OF_IMAGES else AutoModelForCausalLM
    return with_realistic_weights(auto_class.from_config(config, experts_implementation="eager"))


class Begin(TrainerCallback):
    """Patches the model when the Trainer has applied Liger, unless it is patched, and has but the experts' forwards."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        assert not any(layer.accelerated for layer in sonicmoe_hf.supports(model))
        for module in model.modules():  # Liger's own MLPs need a GPU
            if is_bound_by_liger(module) and not hasattr(module, "num_experts"):
                del module.forward
        if not sonicmoe_hf.is_patched(model):
            sonicmoe_hf.patch_model(model)


@pytest.mark.parametrize("family", [*rest_slow(OF_TEXT, 3), *rest_slow(OF_IMAGES)])
def test_a_trainer_with_liger_trains_our_experts_in_every_family_whose_experts_it_replaces(
    family, tmp_path, monkeypatch
):
    if family in OF_IMAGES:  # Transformers 5.23 has none, and Liger would raise an error
        monkeypatch.setattr(output_classes, OF_IMAGES[family], object, raising=False)
    model = small(family)
    expected = dict(run_trainer(twin(model), tmp_path, attach=False, max_steps=2).model.named_parameters())
    liger_alone = {"use_liger_kernel": True, "liger_kernel_config": EXPERTS_ALONE, "max_steps": 2}
    for order in ORDERS:
        version = twin(model)
        if order == "patched, then Liger":
            sonicmoe_hf.patch_model(version)
        run_trainer(version, tmp_path, [Begin()], attach=False, **liger_alone)
        assert all(is_ours(layer.experts) for layer in find_layers(version))
        assert_all_close(dict(version.named_parameters()), expected, 1e-5, ORDER_OF_SUMS)


@pytest.mark.parametrize("order", ["Liger, then LoRA", "LoRA, then Liger", "LoRA, then Liger, then patched"])
def test_adapters_of_the_experts_stay_in_the_computation(order):
    model = build("qwen3_moe")
    expected = loss_and_gradients(with_lora(twin(model)), batch())
    if order == "LoRA, then Liger, then patched":
        adapted = with_lora(model)
        apply_liger(model, **EXPERTS_ALONE)
        assert not any(layer.accelerated for layer in sonicmoe_hf.supports(model))
        sonicmoe_hf.patch_model(adapted)
    else:
        sonicmoe_hf.patch_model(model)
        adapted = model if order == "Liger, then LoRA" else with_lora(model)
        apply_liger(model, **EXPERTS_ALONE)
        adapted = with_lora(model) if order == "Liger, then LoRA" else adapted
    assert_all_close(loss_and_gradients(adapted, batch()), expected, 1e-5, ORDER_OF_SUMS)
    assert not any(map(is_bound_by_liger, model.modules()))


def test_liger_below_accelerates_hooks_is_refused_with_its_switch():
    model = build("qwen3_moe")
    apply_liger(model, **EXPERTS_ALONE)
    for layer in find_layers(model):
        accelerate.hooks.add_hook_to_module(layer.experts, accelerate.hooks.ModelHook())
    words = r"its forward is liger_kernel.*LigerExperts.*swiglu=F"
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=words):
        sonicmoe_hf.patch_model(model)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_of_an_unpatched_model_are_transformers(order):
    model = build("qwen3_moe")
    expected = loss_and_gradients(model, batch())
    apply_both(model, order, **EXPERTS_ALONE)
    loss_and_gradients(model, batch())
    sonicmoe_hf.unpatch_model(model)
    for layer in find_layers(model):
        assert is_ours(layer.experts) and not any("sonicmoe" in name for name in vars(layer.experts))
    assert_all_close(loss_and_gradients(model, batch()), expected, 1e-6, "the same computation")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_built_after_liger_replaced_the_experts_class_is_refused_with_its_switch(family):
    apply = getattr(liger, f"apply_liger_kernel_to_{family}")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    before = dict(vars(module))
    apply(fused_linear_cross_entropy=False)
    model = build(family)
    refusals = sonicmoe_hf.UnsupportedModelError, sonicmoe_hf.UnsupportedExpertsError
    for use in (
        sonicmoe_hf.patch_model,
        sonicmoe_hf.quantize_experts,
        patching([family])(lambda model: build(family)),
    ):
        with pytest.raises(
            refusals,
            match=r"in the place of its experts class before .*keep Liger from the experts by its switch swiglu=False",
        ):
            use(model)
    vars(module).update(before)  # a process in which Liger is kept from the experts
    apply(fused_linear_cross_entropy=False, swiglu=False)
    assert all(layer.accelerated for layer in sonicmoe_hf.patch_model(build(family)).layers)


def test_packing_takes_ligers_forward_from_the_experts():
    model = build("qwen3_moe", **OF_64["qwen3_moe"])
    apply_liger(model, **EXPERTS_ALONE)
    sonicmoe_hf.quantize_experts(model)
    with pytest.raises(RuntimeError, match=r"these experts are packed as nf4.*patch_model"):
        model(**batch(2, 8))


def test_a_native_model_built_after_liger_replaced_the_experts_class_is_refused_with_its_switch():
    liger.apply_liger_kernel_to_qwen3_moe(fused_linear_cross_entropy=False)
    config = NATIVE["qwen3_moe"].config(**build("qwen3_moe").config.to_diff_dict())
    with pytest.raises(sonicmoe_hf.UnsupportedExpertsError, match=r"Liger put LigerExperts .*swiglu=False"):
        AutoModelForCausalLM.from_config(config)


def test_the_trainers_liger_trains_with_our_experts_and_rounds(tmp_path):
    losses = []
    for options in ({}, {"use_liger_kernel": True, "liger_kernel_config": EXPERTS_ALONE}):
        model = build_patched("qwen3_moe")
        watch = Watch(model)
        logs = logs_of(run_trainer(model, tmp_path, [TokenRoundingCallback(tile=TILE)], **options))
        assert all(watch.rounded()) and all(is_ours(layer.experts) for layer in find_layers(model))
        losses.append([log["loss"] for log in logs])
        assert all(log["moe/padded_rows_avoided"] > 0 for log in logs)
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


INTERPRETED = """
import torch
from helpers.models import assert_all_close, batch, build, loss_and_gradients
from patching.test_liger import ORDERS, apply_both, is_ligers

inputs = batch(rows=1, length=8)
models = [build("qwen3_moe") for _ in range(3)]
expected = loss_and_gradients(models.pop(), inputs)
del expected["logits"]  # the fused loss makes none
for order in ORDERS:
    model = apply_both(models.pop(), order, rms_norm=False)
    called = []
    module = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
    rope = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = lambda *args, **kwargs: called.append(rope.__module__) or rope(*args, **kwargs)
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    assert out.logits is None and is_ligers(model)
    assert called == ["liger_kernel.transformers.rope"] * 2, called
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_all_close({"loss": out.loss.detach(), **found}, expected, 1e-5, "fp32: another order of sums")
    module.apply_rotary_pos_emb = rope
"""


@pytest.mark.slow
def test_whole_models_with_ligers_rope_and_loss_and_our_experts_compute_the_same():
    run_python(INTERPRETED, TRITON_INTERPRET="1")
