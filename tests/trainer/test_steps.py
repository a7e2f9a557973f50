"""Requests of callbacks to routers last for a training step: errors and Ctrl-C leave nothing on, and routers that did
not do it are an error."""

import pytest
import torch
from helpers.models import batch, build, loss_and_gradients, patched, twin
from helpers.training import POLICY, TILE, OutOfMemory, Watch, checkpointed, fail_in, trainer_for
from transformers import TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, LoadBalancing, TokenRoundingCallback
from sonicmoe_hf.routing.model import routing_state

ONE_LAYER = {"num_hidden_layers": 1}


def settings(model):
    state = routing_state(model)
    return state.policy, state.counting, state.balancing, state.last


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


@pytest.mark.parametrize("fail", [in_forward, in_backward, in_data, between_steps])
def test_a_run_that_an_error_or_ctrl_c_ends_leaves_nothing_on_once_attached(fail, tmp_path):
    model = build("qwen3_moe", **ONE_LAYER)
    trainer = trainer_for(model, tmp_path, callbacks())
    sonicmoe_hf.attach(trainer)
    fail(trainer)
    with pytest.raises((OutOfMemory, KeyboardInterrupt, AttributeError, TypeError)) as kept:  # and with it the frames
        trainer.train()
    assert kept.tb is not None and settings(model) == (None, False, None, None)


def test_what_an_interrupted_step_left_on_ends_when_the_next_run_begins_or_the_routing_is_set(tmp_path):
    model = patched("qwen3_moe", **ONE_LAYER)
    for _ in range(2):
        trainer = trainer_for(model, tmp_path, callbacks())
        in_backward(trainer)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer_for(model, tmp_path, [ExpertLoadCallback()], max_steps=0).callback_handler.on_train_begin(
        trainer.args, trainer.state, trainer.control
    )
    assert settings(model) == (None, False, None, None)
    routing_state(model).before_step, routing_state(model).policy = {"policy": None}, POLICY
    sonicmoe_hf.set_routing(model, "top_k")
    assert routing_state(model).policy is None and not routing_state(model).before_step


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
    model = patched("qwen3_moe", POLICY, **ONE_LAYER)
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
    with pytest.raises(RuntimeError, match=f"no router of the model has done the {what} that callbacks ask for"):
        trainer.train()


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


def test_compiled_and_checkpointed_layers_train_without_graph_breaks(tmp_path):
    torch._dynamo.reset()
    model = checkpointed(patched("qwen3_moe", use_cache=False, **ONE_LAYER), "non_reentrant")
    model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
    load = ExpertLoadCallback()
    trainer_for(model, tmp_path, [TokenRoundingCallback(tile=TILE), load], max_steps=2).train()
    assert all(log["moe/rows_added"] + log["moe/rows_dropped"] > 0 for log in load.history) and len(load.history) == 2
