"""TokenRoundingCallback in a real Trainer: the schedule, evaluation by top-k, checkpointing, padding."""

import pytest
import torch
from helpers.models import CONFIGS, assert_all_close, batch, build, loss_and_gradients, relative_error, twin
from helpers.resuming import weights
from helpers.training import CHECKPOINTING, POLICY, TILE, Watch, start_counting, trainer_for
from transformers import TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.layer.routing import TokenRounding

SAME_COMPUTATION = "the same kernels on the same numbers: only the order of additions in autograd may differ"


def note_steps(watch, trainer):
    watch.note = lambda: trainer.state.global_step


def checkpointed(model, kind):
    if kind != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[kind])
    return model


# when token rounding is on


@pytest.mark.parametrize(
    "start, end, rounded_steps",
    [(2, 4, {2, 3}), (0.5, 1.0, {3, 4, 5}), (0.0, 1.0, set(range(6))), (1, 0.5, {1, 2}), (4, 100, {4, 5})],
)
def test_rounding_is_on_for_exactly_the_steps_asked_for(start, end, rounded_steps, tmp_path):
    model = build("qwen3_moe")
    watch = Watch(model)
    trainer = trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE, start=start, end=end)], max_steps=6)
    note_steps(watch, trainer)
    trainer.train()
    assert watch.rounded_by_note() == {step: step in rounded_steps for step in range(6)}
    assert sonicmoe_hf.patching.patch.patch_state(model).policy is None, "the policy ends with training"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
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
    change = relative_error(
        by_top_k.model.layers[0].mlp.experts.down_proj, whole["model.layers.0.mlp.experts.down_proj"]
    )
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


def test_every_micro_batch_of_an_accumulated_step_is_rounded_and_the_update_is_their_mean(tmp_path):
    model, by_hand = build("qwen3_moe"), build("qwen3_moe")
    watch = Watch(model)
    trainer = trainer_for(
        model,
        tmp_path,
        [TokenRoundingCallback(tile=TILE, end=1)],
        count=8,
        max_steps=2,
        learning_rate=0.1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
    )
    note_steps(watch, trainer)
    first_step = {}

    class Snapshot(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                first_step.update(weights(model))

    trainer.add_callback(Snapshot())
    trainer.train()
    assert [routing is not None for step, routing in watch.calls] == [True] * 4 + [False] * 4

    sonicmoe_hf.patch_model(by_hand, POLICY)
    for start in (0, 4):
        rows = [trainer.train_dataset[i] for i in range(start, start + 4)]
        (by_hand(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss / 2).backward()
    with torch.no_grad():
        for parameter in by_hand.parameters():
            parameter -= 0.1 * parameter.grad
    assert_all_close(first_step, weights(by_hand), 1e-6, SAME_COMPUTATION)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bf16_training_on_a_cpu_rounds_and_learns(family, tmp_path):
    model = build(family)
    watch = Watch(model)
    trainer = trainer_for(
        model,
        tmp_path,
        [TokenRoundingCallback(tile=TILE)],
        bf16=True,
        count=4,
        max_steps=8,
        num_train_epochs=8,
        learning_rate=0.1,
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert all(watch.rounded())
    assert losses[-1] < 0.9 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# evaluation


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_evaluation_prediction_and_generation_use_top_k_while_training_rounds(family, tmp_path):
    model = build(family)
    watch = Watch(model, note=lambda: "training" if torch.is_grad_enabled() else "inference")
    trainer = trainer_for(
        model, tmp_path, [TokenRoundingCallback(tile=TILE)], eval_on_start=True, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True,
    )  # fmt: skip

    class GenerateWhileTraining(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            assert model.training
            model.generate(batch(4, 24)["input_ids"], max_new_tokens=2, do_sample=False)

    trainer.add_callback(GenerateWhileTraining())
    sonicmoe_hf.attach(trainer)
    trainer.train()
    trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset).predictions
    assert watch.rounded_by_note() == {"training": True, "inference": False}

    plain = build(family)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = plain.eval()(**batch(seed=100)).logits
    logits = torch.from_numpy(predicted[0] if isinstance(predicted, tuple) else predicted)
    assert relative_error(logits, expected) < 1e-5  # fp32: two orders of summation


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_generation_on_a_model_left_in_train_mode_equals_plain_transformers(family, use_cache):
    plain = build(family)
    patched = twin(plain)
    sonicmoe_hf.patch_model(patched, POLICY)
    watch = Watch(patched)
    prompt = batch()["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache}
    assert torch.equal(patched.generate(prompt, **options), plain.generate(prompt, **options))
    assert patched.training and not any(watch.rounded())
    patched(**batch())
    assert all(watch.rounded()), "the same model, called with gradients, rounds"


# gradient checkpointing


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_checkpointing_changes_neither_loss_nor_gradients(family, kind, rounding):
    model = build(family)
    sonicmoe_hf.patch_model(model, TokenRounding(tile=TILE, rounding=rounding))
    again = checkpointed(twin(model), kind)
    inputs = batch(padding=True)
    torch.manual_seed(1)
    expected = loss_and_gradients(model, inputs)
    torch.manual_seed(1)
    assert_all_close(loss_and_gradients(again, inputs), expected, 1e-6, SAME_COMPUTATION)


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_follows_the_schedule(kind, tmp_path):
    ends = []
    for checkpointing in ("none", kind):
        model = checkpointed(build("qwen3_moe"), checkpointing)
        callback = TokenRoundingCallback(tile=TILE, start=1, end=3)
        trainer_for(model, tmp_path, [callback], padding=True, max_steps=5, learning_rate=0.1).train()
        ends.append(weights(model))
    assert_all_close(ends[1], ends[0], 1e-5, SAME_COMPUTATION)


def backward_of_sum(model, batches):
    sum(model(**inputs).loss for inputs in batches).backward()


def backward_in_turn(model, batches):
    for loss in [model(**inputs).loss for inputs in batches]:
        loss.backward()


def backward_in_reverse(model, batches):
    for loss in reversed([model(**inputs).loss for inputs in batches]):
        loss.backward()


def backward_of_a_contrast(model, batches):
    """Two calls meet in one loss after both, as in DPO."""
    first, second = [model(**inputs).logits for inputs in batches]
    torch.nn.functional.softplus((first - second)[:, :12].mean() + first.square().mean()).backward()


@pytest.mark.parametrize("backward", [backward_of_sum, backward_in_turn, backward_in_reverse, backward_of_a_contrast])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_two_forwards_with_different_padding_before_backward_recompute_their_own_routing(kind, rounding, backward):
    # the auxiliary loss reads router logits, which have no gradient where reentrant checkpointing ran the layers without
    model = build("qwen3_moe", output_router_logits=kind == "non_reentrant")
    sonicmoe_hf.patch_model(model, TokenRounding(tile=TILE, rounding=rounding))
    again = checkpointed(twin(model), kind)
    batches = [batch(padding=True, seed=1), batch(seed=2)]
    gradients = []
    for version in (model, again):
        torch.manual_seed(1)
        backward(version, batches)
        gradients.append({name: p.grad for name, p in version.named_parameters()})
    assert_all_close(gradients[1], gradients[0], 1e-6, SAME_COMPUTATION)


# padding


def test_padding_tokens_are_neither_added_nor_counted():
    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model, POLICY)
    start_counting(model)
    watch = Watch(model)
    inputs = batch(padding=True)
    model(**inputs)
    padding = torch.nonzero(inputs["attention_mask"].flatten() == 0).flatten()
    hooks = sonicmoe_hf.patching.patch.router_hooks(model)
    assert len(padding) == 18 and len(watch.calls) == len(hooks) == 2
    for (_, routing), hook in zip(watch.calls, hooks):
        real = routing.expert_index < 8
        assert not torch.isin(routing.token_index[real], padding).any()
        rows = torch.bincount(routing.expert_index[real], minlength=8)
        assert (rows % TILE == 0).all() and rows.sum() > 0
        assert torch.equal(hook.load.take()[:8], rows)


def test_padding_changes_nothing_for_the_other_tokens():
    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model, TokenRounding(tile=TILE, min_tiles_per_expert=0))
    short = batch(4, 16)
    long = {
        name: torch.nn.functional.pad(t, (0, 8), value=-100 if name == "labels" else 0) for name, t in short.items()
    }
    expected, actual = loss_and_gradients(model, short), loss_and_gradients(model, long)
    actual["logits"] = actual["logits"][:, :16]
    assert_all_close(actual, expected, 1e-5, "fp32; attention sums over masked positions too")


# models without our layers


def test_a_model_without_our_layers_is_refused_when_training_begins(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    trainer = trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE)], max_steps=1)
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match="no mixture-of-experts layer"):
        trainer.train()


def test_layers_that_cannot_round_are_refused_with_what_the_caller_can_do(tmp_path):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    model = PhimoeForCausalLM(PhimoeConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                           num_attention_heads=2, num_key_value_heads=2, num_local_experts=4))  # fmt: skip
    trainer = trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE)], max_steps=1)
    with pytest.raises(
        sonicmoe_hf.UnsupportedModelError, match=r"does not know its router.*; leave TokenRoundingCallback out$"
    ):
        trainer.train()
    with pytest.raises(sonicmoe_hf.UnsupportedModelError, match=r"does not know its router.*; use routing=None$"):
        sonicmoe_hf.patch_model(model, "token_rounding")
