"""PEFT, TRL, autocast, accelerate's device maps, copies and files, quantizers and hub kernels."""

import copy
import io
import pickle

import accelerate
import pytest
import torch
from helpers.adapters import EXPERTS, fused
from helpers.models import (
    CONFIGS,
    ORDER_OF_SUMS,
    assert_all_close,
    batch,
    build,
    loss_and_gradients,
    patched,
    relative_error,
    twin,
)
from helpers.training import POLICY, TILE, Watch, start_counting
from helpers.trl_trainers import trl_trainer, word_tokenizer
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from trl import SFTConfig, SFTTrainer

import sonicmoe_hf
from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.kernels import eager
from sonicmoe_hf.patching.patch import patch_state, router_hooks

# PEFT


def with_lora(model, **options):
    """LoRA with B not zero, so that every gradient is there from the first step."""
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **options))


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_token_rounding_with_lora_is_token_rounding_of_the_merged_model(checkpointing):
    model = with_lora(build("qwen3_moe"), target_parameters=EXPERTS)
    merged = twin(model).merge_and_unload().requires_grad_()
    for version in (model, merged):
        sonicmoe_hf.patch_model(version, POLICY)
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    watch = Watch(model)
    actual, expected = loss_and_gradients(model, batch(padding=True)), loss_and_gradients(merged, batch(padding=True))
    assert all(watch.rounded())
    assert_all_close({"loss": actual["loss"]}, {"loss": expected["loss"]}, 1e-5, ORDER_OF_SUMS)
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    assert len(wrappers) == 2 * 2, "two weights in two layers"
    for layer, block in enumerate(merged.model.layers):
        for weight in ("gate_up_proj", "down_proj"):
            wrapper = next(w for w in wrappers[2 * layer : 2 * layer + 2] if w.parameter_name == weight)
            factors = (wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight)
            by_chain_rule = torch.autograd.grad(
                wrapper.get_delta_weight("default"), factors, getattr(block.mlp.experts, weight).grad
            )
            for factor, gradient in zip(factors, by_chain_rule):
                assert relative_error(factor.grad, gradient) < 1e-4  # fp32: W0 + BA is summed before or in the forward


def test_lora_on_attention_alone_computes_no_gradient_of_expert_weights(monkeypatch):
    model = with_lora(build("qwen3_moe"), target_modules=["q_proj", "v_proj"])
    expected = loss_and_gradients(model, batch())
    sonicmoe_hf.patch_model(model)
    for function in ("gate_up_gradient", "down_gradient"):
        monkeypatch.setattr(eager, function, lambda *args: pytest.fail("a gradient that nobody needs was computed"))
    actual = loss_and_gradients(model, batch())
    assert not any("experts" in name for name in actual)
    assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)


# TRL


def train_by_trl(model, folder, config, **options):
    """The trainer, whether each training call was rounded, and the logs of six steps."""
    rows = [{"text": " ".join(f"w{3 + (i * j) % 40}" for j in range(1, 16 + i % 9))} for i in range(48)]
    config = {"max_length": 32, "per_device_train_batch_size": 8, "max_steps": 6, "logging_steps": 1, **config}
    callbacks = [TokenRoundingCallback(tile=TILE)]
    trainer = trl_trainer(SFTTrainer, SFTConfig, model, rows, folder, word_tokenizer(), callbacks, config, **options)
    watch = Watch(trainer.model)
    sonicmoe_hf.attach(trainer)
    trainer.train()
    return set(watch.rounded()), [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("batches", ["padded", "packed", "packed without padding"])
def test_trl_supervised_fine_tuning_rounds_tokens_and_learns(family, batches, tmp_path):
    packing = {
        "padded": {},
        "packed": {"packing": True, "packing_strategy": "wrapped"},
        "packed without padding": {"packing": True, "packing_strategy": "bfd"},
    }[batches]
    config = {"learning_rate": 3e-3, "dataset_num_proc": None, "gradient_checkpointing": True, **packing}
    rounded, logs = train_by_trl(build(family), tmp_path, config)
    assert rounded == {True}
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert all(log["moe/top_k_fallbacks"] == 0 and log["moe/padded_rows_avoided"] > 0 for log in logs)


def test_trl_with_lora_on_the_experts_rounds_tokens_and_learns(tmp_path):
    lora = LoraConfig(r=2, lora_alpha=8, target_parameters=EXPERTS)
    with fused():
        rounded, logs = train_by_trl(build("qwen3_moe"), tmp_path, {"learning_rate": 3e-2}, peft_config=lora)
    assert rounded == {True}
    assert logs[-1]["loss"] < logs[0]["loss"] and logs[-1]["moe/padded_rows_avoided"] > 0


# autocast


@pytest.mark.parametrize("routing", [None, POLICY], ids=["top_k", "token_rounding"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_autocast_errs_no_more_than_eagers(family, routing):
    model = build(family)
    patched = twin(model)
    sonicmoe_hf.patch_model(patched, routing)
    exact = loss_and_gradients(model, batch())
    with torch.autocast("cpu", torch.bfloat16):
        by_eager, by_ours = loss_and_gradients(model, batch()), loss_and_gradients(patched, batch())
    assert all(by_ours[name].dtype == by_eager[name].dtype for name in exact)
    if routing is None:
        error = {name: relative_error(by_eager[name], exact[name]) for name in exact}
        mean = sum(error.values()) / len(error)
        ours = sum(relative_error(by_ours[name], exact[name]) for name in exact) / len(error)
        assert ours <= 1.2 * mean, "bf16 rounds differently in another order; a fifth more is that"
    else:
        assert all(tensor.isfinite().all() for tensor in by_ours.values())
        assert 1e-3 < relative_error(by_ours["logits"], by_eager["logits"]) < 1.0, "rounding was on"


# device maps, copies, files


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("order", ["patched, then dispatched", "dispatched, then patched"])
def test_offloaded_layers_compute_the_same(offload, order, tmp_path):
    model = build("qwen3_moe")
    dispatched = twin(model)
    places = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    if order == "patched, then dispatched":
        sonicmoe_hf.patch_model(dispatched, POLICY)
    if offload == "disk":
        accelerate.dispatch_model(dispatched, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    else:
        accelerate.cpu_offload(dispatched, execution_device="cpu")
    if order == "dispatched, then patched":
        sonicmoe_hf.patch_model(dispatched, POLICY)
    assert any(parameter.is_meta for parameter in dispatched.parameters()), "weights are elsewhere"
    watch = Watch(dispatched)
    with torch.no_grad():
        actual, expected = dispatched.eval()(**batch()).logits, model.eval()(**batch()).logits
    assert len(watch.calls) == 2 and not any(watch.rounded())
    assert relative_error(actual, expected) < 1e-5  # fp32: two orders of summation


def test_training_with_a_device_map_rounds_tokens(tmp_path):
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}).train()
    sonicmoe_hf.patch_model(model, POLICY)
    sonicmoe_hf.patch_model(mapped, POLICY)
    expected = loss_and_gradients(model, batch(padding=True))
    assert_all_close(loss_and_gradients(mapped, batch(padding=True)), expected, 1e-6, "the same computation")


def by_deepcopy(model):
    return copy.deepcopy(model)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [by_deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_copy_trains_as_the_original_and_on_its_own(family, copied):
    try:
        copied(build(family))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        pytest.skip(f"Transformers' own model does not: {error}")
    model = patched(family, POLICY)
    start_counting(model)
    expected = loss_and_gradients(model, batch(padding=True))
    model.zero_grad()
    other = copied(model)
    before = [hook.load.counted.clone() for hook in router_hooks(model)]
    assert_all_close(loss_and_gradients(other, batch(padding=True)), expected, 1e-6, "the same computation")
    assert all(torch.equal(hook.load.counted, count) for hook, count in zip(router_hooks(model), before))
    sonicmoe_hf.set_routing(other, None)
    assert patch_state(model).policy == POLICY and patch_state(other).policy is None
    sonicmoe_hf.unpatch_model(other)
    assert sonicmoe_hf.is_patched(model) and not sonicmoe_hf.is_patched(other)


# what cannot be accelerated


def with_quantized_experts(model):
    """The experts that Transformers' quantizers put in, on the meta device: their kernels need a GPU."""
    from transformers.integrations.finegrained_fp8 import FP8Experts
    from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

    def quantized():
        if model.config.model_type == "gpt_oss":
            return Mxfp4GptOssExperts(model.config)
        return FP8Experts(model.config, block_size=(128, 128))

    for layer in model.model.layers:
        with torch.device("meta"):
            layer.mlp.experts = quantized()
    return model


REMEDIES = {"gpt_oss": r"Mxfp4Config\(dequantize=True\)", "qwen3_moe": r"FineGrainedFP8Config\(dequantize=True\)"}


@pytest.mark.parametrize("family", REMEDIES)
def test_quantized_experts_are_refused_with_the_remedy(family):
    model = with_quantized_experts(build(family))
    assert not any(layer.accelerated for layer in sonicmoe_hf.supports(model))
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=REMEDIES[family]):
        sonicmoe_hf.patch_model(model)


@pytest.mark.parametrize("family", REMEDIES)
def test_experts_quantized_after_patching_are_refused_before_the_first_forward(family):
    sonicmoe_hf.patch()
    try:
        model = with_quantized_experts(build(family))
    finally:
        sonicmoe_hf.unpatch()
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=REMEDIES[family]):
        model(**batch())


@pytest.fixture
def hub_kernels(monkeypatch):
    """What the `kernels` package does to gpt-oss's block class and use_kernels=True to a model, without the hub."""
    monkeypatch.setattr(GptOssMLP, "kernel_layer_name", "MegaBlocksMoeMLP", raising=False)

    def use(model):
        model._use_kernels = True
        assert model.use_kernels
        return model

    return use


def test_use_kernels_is_refused_with_the_remedy(hub_kernels):
    model = hub_kernels(build("gpt_oss"))
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=r"use_kernels=False"):
        sonicmoe_hf.patch_model(model)


def test_use_kernels_after_patching_is_refused_before_the_first_forward(hub_kernels):
    sonicmoe_hf.patch()
    try:
        model = hub_kernels(build("gpt_oss"))
    finally:
        sonicmoe_hf.unpatch()
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=r"use_kernels=False"):
        model(**batch())


def test_use_kernels_that_leave_the_block_alone_are_fine(hub_kernels):
    sonicmoe_hf.patch_model(hub_kernels(build("qwen3_moe")))  # only norms and such are replaced
