"""Requests of callbacks to routers last for a training step: errors and Ctrl-C leave nothing on, and routers that did
not do it are an error."""

import pytest
import torch
from helpers.adapters import with_lora
from helpers.marks import rest_pinned, rest_slow
from helpers.models import ORDER_OF_SUMS, batch, build, build_patched, loss_and_gradients, relative_error, twin
from helpers.training import (
    CHECKPOINTED_TRAINING,
    POLICY,
    TILE,
    OutOfMemory,
    Watch,
    fail_in,
    run_trainer,
    trainer_for,
)
from torch._dynamo.utils import counters
from transformers import TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, LoadBalancing, TokenRoundingCallback
from sonicmoe_hf.routing.patched_model import routing_state

ONE_LAYER = {"num_hidden_layers": 1}
LOGGED = "loss", "eval_loss", "moe/load_cv", "moe/rows_added", "moe/rows_dropped"


def settings(model):
    state = routing_state(model)
    return state.policy, state.counts_load, state.balancing, state.last


def callbacks():
    return [TokenRoundingCallback(tile=TILE), ExpertLoadCallback(), LoadBalancing(per_layer_loss=0.1)]


def in_forward(trainer):
    fail_in(trainer.model.lm_head, OutOfMemory())


def in_backward(trainer):
    def interrupt(gradient):
        raise KeyboardInterrupt

    trainer.model.lm_head.register_forward_hook(lambda module, args, output: output.register_hook(interrupt) and None)


def in_data(trainer):
    trainer.train_dataset = [*trainer.train_dataset][:4] + [None] * 4


class Interrupting(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def between_steps(trainer):
    trainer.add_callback(Interrupting())


@pytest.mark.parametrize("fail", rest_pinned([in_backward, in_forward, in_data, between_steps]))
def test_a_run_that_an_error_or_ctrl_c_ends_leaves_nothing_on_once_attached(fail, tmp_path):
    model = build("qwen3_moe", **ONE_LAYER)
    trainer = trainer_for(model, tmp_path, callbacks())
    sonicmoe_hf.attach(trainer)
    fail(trainer)
    with pytest.raises((OutOfMemory, KeyboardInterrupt, AttributeError, TypeError)) as kept:  # and with it the frames
        trainer.train()
    assert kept.tb is not None and settings(model) == (None, False, None, None)


def test_what_an_interrupted_step_left_on_ends_when_the_next_run_begins_or_the_routing_is_set(tmp_path):
    model = build_patched("qwen3_moe", **ONE_LAYER)
    for _ in range(2):
        trainer = trainer_for(model, tmp_path, callbacks())
        in_backward(trainer)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer_for(model, tmp_path, [ExpertLoadCallback()], max_steps=0).callback_handler.on_train_begin(
        trainer.args, trainer.state, trainer.control
    )
    assert settings(model) == (None, False, None, None)
    routing_state(model).step.replaced, routing_state(model).policy = {"policy": None}, POLICY
    sonicmoe_hf.set_routing(model, "top_k")
    assert routing_state(model).policy is None and not routing_state(model).step.replaced


@pytest.mark.pinned
def test_trainers_after_an_interrupted_one_train_by_their_own_callbacks(tmp_path):
    model = build("qwen3_moe", **ONE_LAYER)
    ours = callbacks()
    trainer = trainer_for(model, tmp_path, ours, max_steps=1)
    sonicmoe_hf.attach(trainer)
    interrupting = Interrupting()
    trainer.add_callback(interrupting)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(interrupting)
    watch = Watch(model)
    trainer_for(model, tmp_path, max_steps=1).train()
    assert watch.rounded() == [False]
    trainer.train()
    assert watch.rounded() == [True], "the same Trainer, again"
    for callback in ours:
        trainer.remove_callback(callback)
    trainer.train()
    assert watch.rounded() == [False]


def test_a_policy_that_the_user_set_is_there_after_training(tmp_path):
    model = build_patched("qwen3_moe", POLICY, **ONE_LAYER)
    watch = Watch(model)
    trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE, start=1)], max_steps=2).train()
    assert watch.rounded() == [False, True] and routing_state(model).policy == POLICY


def test_in_a_loop_that_is_not_the_trainers_callbacks_ask_until_training_ends(tmp_path):
    model = build("qwen3_moe", **ONE_LAYER)
    trainer = trainer_for(model, tmp_path, callbacks())
    handler, arguments = trainer.callback_handler, (trainer.args, trainer.state, trainer.control)
    trainer.state.max_steps = 4
    handler.on_train_begin(*arguments)
    handler.on_step_begin(*arguments)
    watch = Watch(model)
    loss_and_gradients(model, batch())
    assert watch.rounded() == [True] and all(settings(model))
    assert not any(settings(twin(model))), "an average of the weights is a model by itself"
    handler.on_train_end(*arguments)
    assert not any(settings(model)[:3])


# routers that do nothing


@pytest.mark.parametrize(
    ("callback", "what"),
    [
        (TokenRoundingCallback(tile=TILE), "token rounding"),
        (ExpertLoadCallback(), "counting"),
        (LoadBalancing(per_layer_loss=0.1), "balancing"),
    ],
)
def test_a_step_in_which_no_router_does_what_is_asked_is_an_error(callback, what, tmp_path):
    model = build("qwen3_moe", **ONE_LAYER)
    trainer, another = trainer_for(model, tmp_path, [callback]), twin(model)
    trainer.compute_loss = lambda model, inputs, **kwargs: another(**inputs).loss
    words = f"no router of the model has done the {what} that callbacks ask for.* give the Trainer that one"
    with pytest.raises(RuntimeError, match=words):
        trainer.train()
    assert run_trainer(another, tmp_path, [callback], max_steps=1).state.global_step == 1


def test_compiled_code_of_a_model_without_hooks_is_an_error(tmp_path):
    torch._dynamo.reset()
    model = build("qwen3_moe", "sonicmoe_hf", use_cache=False, **ONE_LAYER)
    another = twin(model)
    sonicmoe_hf.patch_model(model)
    torch._dynamo.config.skip_nnmodule_hook_guards = True  # somebody set it back
    for compiled in (another, model):
        compiled.model.layers[0].compile(backend="eager")
    try:
        trainer_for(another, tmp_path, max_steps=1).train()
        with pytest.raises(RuntimeError, match=r"skip_nnmodule_hook_guards to True"):
            trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE)]).train()
    finally:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()


class Generation(TrainerCallback):
    """The tokens that the model generates before training and after each evaluation."""

    def __init__(self):
        self.tokens = []

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        ids = batch()["input_ids"][:2, :4]
        self.tokens.append(model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False).tolist())
        model.train()

    on_train_begin = on_evaluate


@pytest.mark.parametrize("kind", rest_slow(["non_reentrant", "reentrant"]))
def test_compiled_and_checkpointed_layers_train_evaluate_generate_and_resume_as_others(kind, tmp_path):
    """Steps of two micro-batches, rounded and counted. Training alone is compiled: torch takes no more than eight
    variants of a layer, and generation would have one for each. A reentrant checkpoint's forward may be another than
    its second."""
    options = CHECKPOINTED_TRAINING[kind] | {
        "learning_rate": 0.3,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    runs = []
    torch._dynamo.reset()
    counters.clear()
    for compiled, checkpoint in ((False, None), (True, None), (True, str(tmp_path / "1" / "checkpoint-2"))):
        model, generation = with_lora(build_patched("qwen3_moe", **ONE_LAYER), target_modules=["q_proj"]), Generation()
        if compiled:
            sonicmoe_hf.compile_layers(model, backend="aot_eager")
        callbacks = [TokenRoundingCallback(tile=TILE), generation]
        folder = tmp_path / str(len(runs))
        trainer = run_trainer(model, folder, callbacks, count=32, checkpoint=checkpoint, **options)
        assert (0 < counters["stats"]["unique_graphs"] <= 2) is compiled and not counters["graph_break"]
        logs = [log[key] for log in trainer.state.log_history for key in LOGGED if key in log]
        runs.append((logs, generation.tokens, [p.detach() for p in model.parameters() if p.requires_grad]))
    (expected, tokens, weights), *others = runs
    for logs, generated, given in others:
        assert logs == pytest.approx(expected, rel=1e-4), ORDER_OF_SUMS
        assert generated == tokens[-len(generated) :]
        for weight, ours in zip(weights, given):
            assert relative_error(ours, weight) < 1e-4, ORDER_OF_SUMS
