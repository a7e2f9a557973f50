"""PEFT, TRL, autocast, accelerate's device maps, copies and files, quantizers and hub kernels."""

import accelerate
import pytest
import torch
from helpers.adapters import EXPERTS, forbid_merging
from helpers.marks import crossed
from helpers.models import (
    ON_DISK,
    ORDER_OF_SUMS,
    assert_all_close,
    batch,
    build,
    build_patched,
    loss_and_gradients,
    patching,
    relative_error,
    twin,
)
from helpers.training import POLICY, TILE, Watch, logs_of
from helpers.trl_trainers import trl_trainer, watched_training, word_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from trl import SFTConfig, SFTTrainer

import sonicmoe_hf
from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.kernels import eager

# PEFT


def test_lora_on_attention_alone_computes_no_gradient_of_expert_weights(monkeypatch):
    model = get_peft_model(
        build("qwen3_moe"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    expected = loss_and_gradients(model, batch())
    sonicmoe_hf.patch_model(model)
    for function in ("gate_up_gradient", "down_gradient"):
        monkeypatch.setattr(eager, function, lambda *args: pytest.fail("a gradient that nobody needs was computed"))
    actual = loss_and_gradients(model, batch())
    assert not any("experts" in name for name in actual)
    assert_all_close(actual, expected, 1e-5, ORDER_OF_SUMS)


# TRL


def train_by_trl(model, folder, config, **options):
    """Train by TRL. Returns the trainer, whether each training call was rounded, and the logs of six steps."""
    rows = [{"text": " ".join(f"w{3 + (i * j) % 40}" for j in range(1, 16 + i % 9))} for i in range(48)]
    config = {"max_length": 32, "per_device_train_batch_size": 8, "max_steps": 6, "logging_steps": 1, **config}
    callbacks = [TokenRoundingCallback(tile=TILE)]
    trainer = trl_trainer(SFTTrainer, SFTConfig, model, rows, folder, word_tokenizer(), callbacks, config, **options)
    return watched_training(trainer), logs_of(trainer)


@pytest.mark.parametrize(
    "family, batches", crossed(["qwen3_moe", "gpt_oss"], ["padded", "packed", "packed without padding"])
)
def test_trl_supervised_fine_tuning_rounds_tokens_and_learns(family, batches, tmp_path):
    packing = {
        "padded": {},
        "packed": {"packing": True, "packing_strategy": "wrapped"},
        "packed without padding": {"packing": True, "packing_strategy": "bfd"},
    }[batches]
    config = {"learning_rate": 3e-3, "dataset_num_proc": None, "gradient_checkpointing": True, **packing}
    model = build(family)
    if (family, batches) == ("gpt_oss", "packed without padding"):
        model.set_attn_implementation("torch_sinks")  # as the error of its masks says, which have no position_ids
    rounded, logs = train_by_trl(model, tmp_path, config)
    assert rounded == {True: True}
    assert logs[-1]["loss"] < logs[0]["loss"]
    assert all(log["moe/top_k_fallbacks"] == 0 and log["moe/padded_rows_avoided"] > 0 for log in logs)


def test_trl_with_lora_on_the_experts_rounds_tokens_and_learns(tmp_path):
    lora = LoraConfig(r=2, lora_alpha=8, target_parameters=EXPERTS)
    with forbid_merging():
        rounded, logs = train_by_trl(build("qwen3_moe"), tmp_path, {"learning_rate": 3e-2}, peft_config=lora)
    assert rounded == {True: True}
    assert logs[-1]["loss"] < logs[0]["loss"] and logs[-1]["moe/padded_rows_avoided"] > 0


# autocast


@pytest.mark.parametrize("routing", [None, POLICY], ids=["top_k", "token_rounding"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_autocast_errs_no_more_than_eagers(family, routing):
    model, ours = build(family), build_patched(family, routing)
    exact = loss_and_gradients(model, batch())
    with torch.autocast("cpu", torch.bfloat16):
        by_eager, by_ours = loss_and_gradients(model, batch()), loss_and_gradients(ours, batch())
    assert all(by_ours[name].dtype == by_eager[name].dtype for name in exact)
    if routing is None:
        error = {name: relative_error(by_eager[name], exact[name]) for name in exact}
        mean = sum(error.values()) / len(error)
        mean_of_ours = sum(relative_error(by_ours[name], exact[name]) for name in exact) / len(error)
        assert mean_of_ours <= 1.2 * mean, "bf16 rounds differently in another order; a fifth more is that"
    else:
        assert all(tensor.isfinite().all() for tensor in by_ours.values())
        assert 1e-3 < relative_error(by_ours["logits"], by_eager["logits"]) < 1.0, "rounding was on"


# device maps, copies, files


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("order", ["patched, then dispatched", "dispatched, then patched"])
def test_offloaded_layers_compute_the_same(offload, order, tmp_path):
    model = build("qwen3_moe")
    dispatched = twin(model)
    if order == "patched, then dispatched":
        sonicmoe_hf.patch_model(dispatched, POLICY)
    if offload == "disk":
        accelerate.dispatch_model(dispatched, ON_DISK, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
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
    model = build_patched("qwen3_moe", POLICY)
    model.save_pretrained(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"}).train()
    sonicmoe_hf.patch_model(mapped, POLICY)
    expected = loss_and_gradients(model, batch(padding=True))
    assert_all_close(loss_and_gradients(mapped, batch(padding=True)), expected, 1e-6, "the same computation")


# what cannot be accelerated


def with_quantized_experts(model):
    """Put in the experts that Transformers' quantizers put in, on the meta device: their kernels need a GPU."""
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


def with_hub_kernels(model):
    """Change a model as use_kernels=True does, without the hub."""
    model._use_kernels = True
    assert model.use_kernels
    return model


@pytest.fixture
def kernels_package(monkeypatch):
    """Change gpt-oss's block class as the `kernels` package does."""
    monkeypatch.setattr(GptOssMLP, "kernel_layer_name", "MegaBlocksMoeMLP", raising=False)


@pytest.mark.parametrize(
    "family, change, remedy",
    [
        ("gpt_oss", with_quantized_experts, r"Mxfp4Config\(dequantize=True\)"),
        ("qwen3_moe", with_quantized_experts, r'experts_quantization="fp8"'),
        ("gpt_oss", with_hub_kernels, "use_kernels=False"),
    ],
)
def test_experts_that_others_replaced_are_refused_with_the_remedy(family, change, remedy, kernels_package):
    """Patch_model refuses them, as does the first forward of a model that was patched while it was built."""
    model = change(build(family))
    for given in (model, torch.nn.Sequential(model)):  # a wrapper that has not the model's attributes, as DDP
        assert not any(layer.accelerated for layer in sonicmoe_hf.supports(given))
    with patching():
        patched_when_built = change(build(family))
    for use in (lambda: sonicmoe_hf.patch_model(model), lambda: patched_when_built(**batch())):
        with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=remedy):
            use()


def test_use_kernels_that_leave_the_block_alone_are_fine(kernels_package):
    sonicmoe_hf.patch_model(with_hub_kernels(build("qwen3_moe")))  # only norms and such are replaced
