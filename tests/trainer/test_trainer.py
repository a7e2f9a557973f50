"""TokenRoundingCallback in a real Trainer: the schedule, evaluation by top-k, checkpointing, padding."""

import itertools
import weakref
from typing import ClassVar

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.marks import rest_pinned, rest_slow
from helpers.models import (
    CONFIGS,
    OF_64,
    assert_all_close,
    batch,
    build,
    build_patched,
    loss_and_gradients,
    relative_error,
    twin,
)
from helpers.resuming import SAVING, Snapshots, weights
from helpers.training import (
    CHECKPOINTING,
    POLICY,
    TILE,
    Watch,
    checkpoint_layers,
    logs_of,
    run_trainer,
    start_counting,
    trainer_for,
)
from peft import get_peft_model_state_dict
from transformers import TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.layer.routing import TokenRounding
from sonicmoe_hf.routing.patched_model import routing_state

SAME_COMPUTATION = "the same kernels on the same numbers: only the order of additions in autograd may differ"


def note_steps(watch, trainer):
    watch.note = lambda: trainer.state.global_step


# when token rounding is on


@pytest.mark.pinned
@pytest.mark.parametrize("turn", [1, -1])
def test_callbacks_for_stretches_of_their_own_take_turns(turn, tmp_path):
    model, stretches = build("qwen3_moe", num_hidden_layers=1), {"nearest": (0, 1), "down": (2, 3)}
    callbacks = [TokenRoundingCallback(name, TILE, *stretch) for name, stretch in stretches.items()]
    trainer = trainer_for(model, tmp_path, callbacks[::turn])
    watch = Watch(model, lambda: (trainer.state.global_step, getattr(routing_state(model).policy, "rounding", None)))
    trainer.train()
    assert watch.calls and watch.rounded_by_note() == {
        (step, policy): policy is not None for step, policy in enumerate(["nearest", None, "down", None])
    }


@pytest.mark.parametrize(
    "start, end, rounded_steps",
    rest_pinned(
        [(1, 0.5, {1, 2}), (2, 4, {2, 3}), (0.5, 1.0, {3, 4, 5}), (0.0, 1.0, set(range(6))), (4, 100, {4, 5})]
    ),
)
def test_rounding_is_on_for_exactly_the_steps_asked_for(start, end, rounded_steps, tmp_path):
    model = build("qwen3_moe")
    watch = Watch(model)
    trainer = trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE, start=start, end=end)], max_steps=6)
    note_steps(watch, trainer)
    trainer.train()
    assert watch.rounded_by_note() == {step: step in rounded_steps for step in range(6)}
    assert routing_state(model).policy is None, "the policy ends with training"


@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "gpt_oss"]))
def test_a_resumed_run_continues_the_schedule_and_ends_where_an_uninterrupted_one_does(family, tmp_path):
    def run(folder, model, checkpoint=None, **options):
        watch = Watch(model)
        callback = TokenRoundingCallback(tile=TILE, start=2, end=5)
        trainer = trainer_for(model, folder, [callback], count=24, max_steps=6, learning_rate=0.1, **options)
        note_steps(watch, trainer)
        sonicmoe_hf.attach(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights(model), watch.rounded_by_note()

    whole, _ = run(tmp_path / "whole", build(family), save_strategy="steps", save_steps=3)
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    resumed, rounded = run(tmp_path / "resumed", build(family, seed=5), checkpoint)
    assert rounded == {3: True, 4: True, 5: False}
    assert_all_close(resumed, whole, 1e-6, SAME_COMPUTATION)
    by_top_k = build(family)
    trainer_for(by_top_k, tmp_path / "top_k", count=24, max_steps=6, learning_rate=0.1).train()
    down = "model.layers.0.mlp.experts.down_proj"
    change = relative_error(by_top_k.get_parameter(down), whole[down])
    assert change > 1e-4, "rounding changes the training, so the comparison could fail"


@pytest.mark.parametrize(
    "options, says",
    [
        ({"start": -1}, "start is -1"),
        ({"start": 1.5}, "start is 1.5"),
        ({"end": True}, "end is True"),
        ({"end": "half"}, "end is 'half'"),
        ({"start": 5, "end": 5}, "start 5 must come before end 5"),
        ({"start": 0.8, "end": 0.2}, "start 0.8 must come before end 0.2"),
        ({"rounding": "sideways"}, "rounding is 'sideways'"),
        ({"tile": 0}, "tile is 0"),
        ({"min_tiles_per_expert": -1}, "min_tiles_per_expert is -1"),
    ],
)
def test_bad_arguments_are_refused_at_once_with_their_value(options, says):
    with pytest.raises(ValueError, match=says):
        TokenRoundingCallback(**options)


@pytest.mark.pinned
def test_the_models_own_tile_is_kept_and_another_is_refused(tmp_path):
    model = build_patched("qwen3_moe", TokenRounding(tile=TILE), num_hidden_layers=1)
    watch, callback = Watch(model), TokenRoundingCallback(end=1)
    run_trainer(model, tmp_path, [callback], max_steps=2)
    assert watch.rounded() == [True, False] and callback.policy.tile is None, "with 128 rows both would be top-k"
    with pytest.raises(ValueError, match=r"TokenRoundingCallback has tile=8, and the model has tile=4"):
        run_trainer(model, tmp_path, [TokenRoundingCallback(tile=8)], max_steps=1)


def test_every_micro_batch_of_an_accumulated_step_is_rounded_and_the_update_is_their_mean(tmp_path):
    model, by_hand = build("qwen3_moe"), build_patched("qwen3_moe", POLICY)
    watch = Watch(model)
    options = {"max_steps": 2, "learning_rate": 0.1, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    snapshots = Snapshots()
    callbacks = [TokenRoundingCallback(tile=TILE, end=1), snapshots]
    trainer = run_trainer(model, tmp_path, callbacks, attach=False, count=8, **options)
    assert [routing is not None for _, routing in watch.calls] == [True] * 4 + [False] * 4

    for start in (0, 4):
        rows = [trainer.train_dataset[i] for i in range(start, start + 4)]
        (by_hand(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss / 2).backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter -= 0.1 * parameter.grad
    assert_all_close(snapshots.at[1], weights(by_hand), 1e-6, SAME_COMPUTATION)


@pytest.mark.parametrize("family", rest_pinned(["gpt_oss", "qwen3_moe"]))
def test_bf16_training_on_a_cpu_rounds_and_learns(family, tmp_path):
    model = build(family)
    watch = Watch(model)
    options = {"bf16": True, "max_steps": 8, "num_train_epochs": 8, "learning_rate": 0.1}
    logs = logs_of(run_trainer(model, tmp_path, [TokenRoundingCallback(tile=TILE)], attach=False, count=4, **options))
    assert all(watch.rounded())
    assert logs[-1]["loss"] < 0.9 * logs[0]["loss"]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# evaluation


@pytest.mark.parametrize("family", rest_pinned(["qwen3_moe", "deepseek_v3"]))
def test_evaluation_prediction_and_generation_use_top_k_while_training_rounds(family, tmp_path):
    model = build(family)
    watch = Watch(model, note=lambda: "training" if torch.is_grad_enabled() else "inference")
    options = {
        "eval_on_start": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **SAVING,
        "load_best_model_at_end": True,
    }

    class GenerateWhileTraining(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            assert model.training
            model.generate(batch(4, 24)["input_ids"], max_new_tokens=2, do_sample=False)

    trainer = run_trainer(model, tmp_path, [TokenRoundingCallback(tile=TILE), GenerateWhileTraining()], **options)
    trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset).predictions
    assert watch.rounded_by_note() == {"training": True, "inference": False}

    plain = build(family)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = plain.eval()(**batch(seed=100)).logits
    logits = torch.from_numpy(predicted[0] if isinstance(predicted, tuple) else predicted)
    assert relative_error(logits, expected) < 1e-5  # fp32: two orders of summation


@pytest.mark.parametrize("use_cache", rest_pinned([True, False]))
@pytest.mark.parametrize("family", CONFIGS)
def test_generation_on_a_model_left_in_train_mode_equals_plain_transformers(family, use_cache):
    plain, ours = build(family), build_patched(family, POLICY)
    watch = Watch(ours)
    prompt = batch()["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache}
    assert torch.equal(ours.generate(prompt, **options), plain.generate(prompt, **options))
    assert ours.training and not any(watch.rounded())
    ours(**batch())
    assert all(watch.rounded()), "the same model, called with gradients, rounds"


# gradient checkpointing


@pytest.mark.parametrize("rounding", rest_pinned(["stochastic", "nearest"]))
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_checkpointing_changes_neither_loss_nor_gradients(family, kind, rounding):
    model = build_patched(family, TokenRounding(tile=TILE, rounding=rounding))
    again = checkpoint_layers(twin(model), kind)
    inputs = batch(padding=True)
    torch.manual_seed(1)
    expected = loss_and_gradients(model, inputs)
    torch.manual_seed(1)
    assert_all_close(loss_and_gradients(again, inputs), expected, 1e-6, SAME_COMPUTATION)


def adapted(experts):
    """Make a model with adapters, of packed experts or not; what is recomputed calls its routers' hooks again."""
    model = build_patched("qwen3_moe", POLICY, **OF_64["qwen3_moe"])
    if experts == "nf4":
        sonicmoe_hf.quantize_experts(model, "nf4")
    return with_lora(model, target_modules=["q_proj"])


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Counts the copies that Transformers makes to the host, in the place of its context on CPUs."""

    shapes: ClassVar[list] = []

    def __init__(self, **options):
        super().__init__(lambda tensor: self.shapes.append(tensor.shape) or tensor.clone(), lambda tensor: tensor)


@pytest.mark.pinned
@pytest.mark.parametrize("kind, experts", rest_slow(itertools.product(CHECKPOINTING, ["dense", "nf4"])))
def test_checkpoints_of_layers_in_host_memory_change_no_bit(kind, experts, tmp_path, monkeypatch):
    """Transformers' option beside accumulation, balancing, evaluation and resuming. It copies the layers' inputs alone:
    neither frozen nor packed weights."""
    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", OnHost)
    OnHost.shapes.clear()
    found = []
    for kwargs in (CHECKPOINTING[kind], CHECKPOINTING[kind] | {"offload": True}):
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs, "learning_rate": 0.05}
        options |= {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
        model, balancing = adapted(experts), [sonicmoe_hf.LoadBalancing(0.5)]
        run_trainer(model, tmp_path, balancing, **options, **SAVING)
        resumed, checkpoint = adapted(experts), str(tmp_path / "checkpoint-2")
        run_trainer(resumed, tmp_path, balancing, checkpoint=checkpoint, **options)
        found += [get_peft_model_state_dict(each) for each in (model, resumed)]
    for other in found[1:]:
        assert_all_close(other, found[0], 0.0, "the same steps, and copies")
    inputs, layers, calls = batch()["input_ids"], 2, 2 * (3 + 1)
    shapes = [shape for shape in OnHost.shapes if shape.numel()]  # torch 2.11 saves an empty tensor, too
    assert shapes == [(*inputs.shape, OF_64["qwen3_moe"]["hidden_size"])] * (layers * calls)


def test_what_checkpoints_keep_in_host_memory_leaves_the_device(monkeypatch):
    monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", OnHost)
    model, alive = build_patched("qwen3_moe"), []
    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(args[0].untyped_storage())))
    for offload in (False, True):
        model.gradient_checkpointing_enable(offload=offload)
        alive.clear()
        loss = model(**batch()).loss
        assert [storage() is None for storage in alive] == [offload]
        loss.backward()


LOSSES = {  # of two calls, in the order of their backwards
    "the sum": lambda first, second: [first.loss + second.loss],
    "in turn": lambda first, second: [first.loss, second.loss],
    "in reverse": lambda first, second: [second.loss, first.loss],
    "a contrast": lambda first, second: [  # the calls meet in one loss after both, as in DPO
        torch.nn.functional.softplus((first.logits - second.logits)[:, :12].mean() + first.logits.square().mean())
    ],
}


@pytest.mark.parametrize("losses_of", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("rounding", rest_pinned(["stochastic", "nearest"]))
@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_two_forwards_with_different_padding_before_backward_recompute_their_own_routing(kind, rounding, losses_of):
    # the auxiliary loss reads router logits, which have no gradient where reentrant checkpointing ran the layers without
    policy = TokenRounding(tile=TILE, rounding=rounding)
    model = build_patched("qwen3_moe", policy, output_router_logits=kind == "non_reentrant")
    again = checkpoint_layers(twin(model), kind)
    batches = [batch(padding=True, seed=1), batch(seed=2)]
    gradients = []
    for version in (model, again):
        torch.manual_seed(1)
        losses = losses_of(*[version(**inputs) for inputs in batches])
        sonicmoe_hf.set_routing(version.eval(), "top_k")  # for calls to come
        for loss in losses:
            loss.backward()
        gradients.append({name: p.grad for name, p in version.named_parameters()})
    assert_all_close(gradients[1], gradients[0], 1e-6, SAME_COMPUTATION)


# padding


def test_padding_tokens_are_neither_added_nor_counted():
    model = build_patched("qwen3_moe", POLICY)
    start_counting(model)
    watch = Watch(model)
    inputs = batch(padding=True)
    model(**inputs)
    padding = torch.nonzero(inputs["attention_mask"].flatten() == 0).flatten()
    hooks = sonicmoe_hf.routing.patched_model.router_hooks(model)
    assert len(padding) == 18 and len(watch.calls) == len(hooks) == 2
    for (_, routing), hook in zip(watch.calls, hooks):
        real = routing.expert_index < 8
        assert not torch.isin(routing.token_index[real], padding).any()
        rows = torch.bincount(routing.expert_index[real], minlength=8)
        assert (rows % TILE == 0).all() and rows.sum() > 0
        assert torch.equal(hook.load.take()[:8], rows)


def test_padding_changes_nothing_for_the_other_tokens():
    model = build_patched("qwen3_moe", TokenRounding(tile=TILE, min_tiles_per_expert=0))
    short = batch(4, 16)
    long = {
        name: torch.nn.functional.pad(t, (0, 8), value=-100 if name == "labels" else 0) for name, t in short.items()
    }
    expected, actual = loss_and_gradients(model, short), loss_and_gradients(model, long)
    actual["logits"] = actual["logits"][:, :16]
    assert_all_close(actual, expected, 1e-5, "fp32; attention sums over masked positions too")


# models without our layers


@pytest.mark.pinned
def test_layers_that_cannot_round_are_refused_with_what_the_caller_can_do(tmp_path):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    model = PhimoeForCausalLM(
        PhimoeConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )
    trainer = trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE)], max_steps=1)
    for use, remedy in (
        (trainer.train, "leave TokenRoundingCallback out"),
        (lambda: sonicmoe_hf.patch_model(model, "token_rounding"), "use routing=None"),
    ):
        with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=rf"does not know its router.*; {remedy}$"):
            use()
