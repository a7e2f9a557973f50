"""LoadBalancing: the gradients of every layer's loss, its scale in training, and the update of correction biases."""

from types import SimpleNamespace

import pytest
import torch
from helpers.models import (
    ORDER_OF_SUMS,
    assert_all_close,
    batch,
    build,
    build_patched,
    gradients_of,
    loss_and_gradients,
    twin,
)
from helpers.training import CHECKPOINTED_TRAINING, CHECKPOINTING, POLICY, Routers, checkpoint_layers, run_trainer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import sonicmoe_hf
from sonicmoe_hf import LoadBalancing
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.routing.patched_model import router_hooks

WEIGHT, K, E = 0.5, 2, 8  # a weight at which the loss shows in every gradient
KINDS = ["none", *CHECKPOINTING]
TWO_MICRO_BATCHES = {"max_steps": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def by_hand(family, calls, mask):
    """Compute the balancing loss of a forward's layers, from their logits: Transformers' own function, one layer at a
    time."""
    losses = []
    for logits, index in calls:
        if family == "qwen3_moe":
            losses.append(load_balancing_loss_func((logits,), E, K, mask))
            continue
        valid = mask.flatten().float()
        scores = logits.sigmoid()
        shares = (scores / scores.sum(-1, keepdim=True) * valid[:, None]).sum(0) / valid.sum()
        counts = torch.nn.functional.one_hot(index, E).sum(1) * valid[:, None]
        losses.append(E * (counts.sum(0) / valid.sum() * shares).sum())
    return WEIGHT * sum(losses) / len(losses)


def with_loss_by_hand(family, model, inputs, factor):
    routers = Routers(model)
    out = model(**inputs)
    (factor * (out.loss + by_hand(family, routers.take(), inputs["attention_mask"]))).backward()
    return gradients_of(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_its_gradients_are_those_of_every_layers_loss_scaled_as_the_models_is(family, kind):
    model, ours, inputs = build(family), checkpoint_layers(build_patched(family), kind), batch(padding=True)
    balancing = LoadBalancing(per_layer_loss=WEIGHT, bias_update=1e-3 if family == "deepseek_v3" else None)
    balancing.start(ours)
    (3.0 * ours(**inputs).loss).backward()
    assert_all_close(gradients_of(ours), with_loss_by_hand(family, model, inputs, 3.0), 1e-5, ORDER_OF_SUMS)
    for hook in router_hooks(ours) if balancing.bias_update else ():
        assert hook.bias_load.pairs_E.sum() == K * inputs["attention_mask"].sum(), "also where layers are recomputed"
    balancing.stop(ours)
    assert_all_close(loss_and_gradients(ours, inputs), loss_and_gradients(model, inputs), 1e-5, ORDER_OF_SUMS)


def test_layers_that_share_their_experts_each_count_in_the_mean():
    model, inputs = build("qwen3_moe", num_hidden_layers=3), batch(padding=True)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    ours = twin(model)
    sonicmoe_hf.patch_model(ours)
    LoadBalancing(per_layer_loss=WEIGHT).start(ours)
    ours(**inputs).loss.backward()
    assert_all_close(gradients_of(ours), with_loss_by_hand("qwen3_moe", model, inputs, 1.0), 1e-5, ORDER_OF_SUMS)


def test_a_loss_computed_outside_the_model_gives_the_scale():
    model, ours, inputs = build("qwen3_moe"), build_patched("qwen3_moe"), batch()
    balancing = LoadBalancing(per_layer_loss=WEIGHT)
    balancing.start(ours)
    labels = inputs.pop("labels")
    with pytest.raises(RuntimeError, match=r"in a loop of your own, balancing.scaled_as\(model, loss\) before"):
        ours(**inputs).logits.sum().backward()
    ours.zero_grad()
    logits = ours(**inputs).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    (2.0 * balancing.scaled_as(ours, loss)).backward()
    expected = with_loss_by_hand("qwen3_moe", model, {**inputs, "labels": labels}, 2.0)
    assert_all_close(gradients_of(ours), expected, 1e-5, ORDER_OF_SUMS)


def test_a_scale_before_the_first_call_is_an_error_that_says_so():
    model, loss = build_patched("qwen3_moe"), torch.ones((), requires_grad=True)
    balancing = LoadBalancing(per_layer_loss=WEIGHT)
    balancing.start(model)
    with pytest.raises(RuntimeError, match=r"scaled_as: this model was not called .* call it first"):
        balancing.scaled_as(model, loss)


@pytest.mark.parametrize(
    "given, returns_logits, remedy",
    [
        ({}, False, None),
        ({}, True, "set model.config.output_router_logits = False"),
        ({"router_aux_loss_coef": None}, False, "pass router_aux_loss_coef=0.0"),
        ({"router_aux_loss_coef": 0.0}, False, None),
    ],
)
def test_a_router_loss_of_the_trainers_own_beside_it_gives_a_warning_with_the_remedy(
    given, returns_logits, remedy, messages
):
    LoadBalancing(per_layer_loss=WEIGHT).on_train_begin(
        SimpleNamespace(load_best_model_at_end=False, **given),
        SimpleNamespace(global_step=0),
        None,
        build("qwen3_moe", output_router_logits=returns_logits),
    )
    assert bool(messages.about("so that both count")) == bool(messages.about(remedy or "both count")) == bool(remedy)


def test_a_loop_of_ones_own_is_warned_of_a_router_loss_of_the_models_own_too(messages):
    LoadBalancing(per_layer_loss=WEIGHT).start(build_patched("qwen3_moe", output_router_logits=True))
    (said,) = messages.about("a router loss of the model's own")
    assert "set model.config.output_router_logits = False" in said


def test_under_token_rounding_it_counts_top_k():
    model, inputs = build_patched("qwen3_moe", POLICY, num_hidden_layers=1), batch()
    rounded = loss_and_gradients(model, inputs)
    LoadBalancing(per_layer_loss=WEIGHT).start(model)
    balanced = loss_and_gradients(model, inputs)
    assert torch.equal(balanced["logits"], rounded["logits"]), "the forward is as it was"
    plain = build("qwen3_moe", num_hidden_layers=1)  # its only router sees what the rounded one's sees
    routers = Routers(plain)
    plain(**inputs)
    by_hand("qwen3_moe", routers.take(), inputs["attention_mask"]).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            difference = balanced[name] - rounded[name]
            assert (difference - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


def test_in_the_trainer_micro_batches_count_by_their_labels(tmp_path):
    """One step of two micro-batches of different lengths; SGD with a rate of 1 leaves the gradient in the weights."""
    model = build("qwen3_moe")
    before, reference = twin(model), twin(model)
    balancing = [LoadBalancing(per_layer_loss=WEIGHT)]
    trainer = run_trainer(model, tmp_path, balancing, False, padding=True, learning_rate=1.0, **TWO_MICRO_BATCHES)

    routers, total = Routers(reference), (trainer.train_dataset.columns["labels"][:4, 1:] != -100).sum()
    for rows in (slice(0, 2), slice(2, 4)):
        inputs = {name: column[rows] for name, column in trainer.train_dataset.columns.items()}
        share = (inputs["labels"][:, 1:] != -100).sum() / total
        loss = reference(**inputs).loss
        (share * (loss + by_hand("qwen3_moe", routers.take(), inputs["attention_mask"]))).backward()
    found = {name: old - new for (name, new), old in zip(model.named_parameters(), before.parameters())}
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert_all_close(found, expected, 1e-4, "fp32: differences of weights of size 1")


@pytest.mark.parametrize("kind", KINDS)
def test_biases_follow_the_counts_of_a_whole_step_and_are_saved(kind, tmp_path):
    model = build("deepseek_v3").bfloat16()
    before = [layer.router.e_score_correction_bias.float() for layer in find_layers(model)]
    options = {**TWO_MICRO_BATCHES, **CHECKPOINTED_TRAINING[kind]}
    routers = Routers(model)
    sonicmoe_hf.patch_model(model, POLICY)
    trainer = run_trainer(model, tmp_path, [LoadBalancing(bias_update=1e-3)], False, padding=True, **options)
    layers, masks = list(find_layers(model)), trainer.train_dataset.columns["attention_mask"][:4]
    calls = routers.take()
    per_batch = len(calls) // 2  # recomputed ones follow those of the forward
    counts = [0] * len(layers)
    for number, mask in enumerate((masks[:2], masks[2:])):
        for place, (_, index) in enumerate(calls[number * per_batch :][: len(layers)]):
            counts[place] += torch.bincount(index[mask.flatten() != 0].flatten(), minlength=E)
    for layer, old, count in zip(layers, before, counts):
        bias = layer.router.e_score_correction_bias
        expected = old + 1e-3 * (count.float().mean() - count).sign()
        assert bias.dtype == torch.float32 and torch.allclose(bias, expected, rtol=0, atol=1e-7)
        assert (bias != old).any()
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for layer, loaded in zip(layers, find_layers(again)):
        assert torch.equal(loaded.router.e_score_correction_bias.float(), layer.router.e_score_correction_bias)


@pytest.mark.parametrize("family, at_first", [("deepseek_v3", 2.5), ("nemotron_h", 2.0)])
def test_training_with_it_balances_a_router_that_starts_out_of_balance(family, at_first):
    model, inputs = build_patched(family, n_group=1, topk_group=1), batch(rows=8)
    router = next(find_layers(model)).router
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.linspace(0, 0.5, E))
    balancing, routers, loads = LoadBalancing(bias_update=1e-2), Routers(model), []
    balancing.start(model)
    for _ in range(40):
        model(**inputs)
        counts = torch.bincount(routers.take()[0][1].flatten(), minlength=E).float()
        loads.append((counts.max() / counts.mean()).item())
        balancing.step(model)
    assert loads[0] > at_first and loads[-1] < 1.3


def test_what_it_cannot_do_is_refused_by_name(tmp_path):
    adapted = get_peft_model(build("deepseek_v3"), LoraConfig(target_modules=["o_proj"]))
    sonicmoe_hf.patch_model(adapted)
    for model, options, words in (
        (None, {}, "LoadBalancing does nothing: give it per_layer_loss=0.05"),
        (None, {"per_layer_loss": -1}, "per_layer_loss is -1; give a number above 0, such as 0.05"),
        (build("qwen3_moe"), {"per_layer_loss": 1.0}, "Qwen3MoeForCausalLM is not patched"),
        (build_patched("qwen3_moe"), {"bias_update": 1e-3}, "Qwen3MoeTopKRouter has no correction bias"),
        (adapted, {"bias_update": 1e-3}, "which an adapter's checkpoint leaves out"),
    ):
        with pytest.raises(ValueError, match=words):
            LoadBalancing(**options).start(model)
    with pytest.raises(ValueError, match="two LoadBalancing callbacks, of which one would do nothing"):
        run_trainer(
            build("deepseek_v3"), tmp_path, [LoadBalancing(0.05), LoadBalancing(bias_update=1e-3)], attach=False
        )
