"""A callback without attach: the digest in a checkpoint tells a model that lost its experts from one that did not."""

import json

import pytest
import torch
from helpers.models import CONFIGS, build
from helpers.resuming import SAVING, assert_equal, rounding, train, weights
from helpers.training import TILE, trainer_for
from transformers import AutoModelForCausalLM, TrainerCallback

import sonicmoe_hf
from sonicmoe_hf import ExpertLoadCallback, TokenRoundingCallback
from sonicmoe_hf.trainer.weights_digest import DIGEST, changed_experts, experts_digest


@pytest.mark.parametrize("callback", [rounding, ExpertLoadCallback])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_callback_alone_stops_a_resume_that_lost_the_experts(family, callback, tmp_path):
    straight = train(build(family), tmp_path / "straight", callbacks=[callback()], attach=False)
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")

    def resume():
        return train(build(family), tmp_path / "resumed", checkpoint, callbacks=[callback()], attach=False)

    if family == "gpt_oss":  # the hub's layout is the model's: nothing is lost
        assert_equal(weights(resume().model), weights(straight.model))
    else:
        with pytest.raises(
            RuntimeError,
            match=r"the experts of the resumed model are not the checkpoint's: \d of \d .*attach\(trainer\)",
        ):
            resume()


def test_one_expert_that_differs_is_enough(tmp_path):
    train(build("qwen3_moe"), tmp_path / "straight", attach=False)
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3].mul_(1.001)
    with pytest.raises(
        RuntimeError, match=r"1 of 4 expert weights differ \(first: model.layers.1.mlp.experts.down_proj\)"
    ):
        train(model, tmp_path / "resumed", checkpoint, attach=False)


@pytest.mark.parametrize("saved, resumed", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_another_dtype_is_no_difference(saved, resumed, tmp_path):
    model = build("qwen3_moe").to(getattr(torch, saved))
    train(model, tmp_path / "straight", attach=False)
    checkpoint = str(tmp_path / "straight" / "checkpoint-4")
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=resumed)
    assert changed_experts(experts_digest(model), loaded) == []
    train(loaded, tmp_path / "resumed", checkpoint, attach=False, max_steps=5)
    with pytest.raises(RuntimeError, match="experts of the resumed model"):
        train(build("qwen3_moe").to(getattr(torch, resumed)), tmp_path / "lost", checkpoint, attach=False, max_steps=5)


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoint_without_a_digest_is_warned_of_only_where_experts_may_be_lost(family, attach, tmp_path, messages):
    train(build(family), tmp_path, callbacks=[], attach=False, max_steps=2)
    resumed = train(build(family), tmp_path, True, attach=attach)
    assert len(messages.about("no digest of the experts")) == (family == "qwen3_moe" and not attach)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert set(state["stateful_callbacks"]["TokenRoundingCallback"]["attributes"][DIGEST]["weights"]) == {
        name for name, _ in resumed.model.named_parameters() if ".experts." in name
    }


def test_checkpoints_resume_without_our_callbacks_and_with_restored_ones(tmp_path):
    straight = train(build("gpt_oss"), tmp_path / "straight")
    checkpoint = str(tmp_path / "straight" / "checkpoint-2")
    train(build("gpt_oss"), tmp_path / "bare", checkpoint, callbacks=[], attach=False)
    other = TokenRoundingCallback(tile=4, start=3)
    restored_callbacks = train(
        build("gpt_oss"),
        tmp_path / "restored",
        checkpoint,
        callbacks=[other],
        restore_callback_states_from_checkpoint=True,
    )
    assert_equal(weights(restored_callbacks.model), weights(straight.model))
    assert any("moe/load_cv" in log for log in restored_callbacks.state.log_history if log["step"] == 4)


def test_of_two_callbacks_of_one_class_the_digest_of_the_checkpoint_counts(tmp_path):
    def stretches():
        return [TokenRoundingCallback(tile=TILE, end=3), ExpertLoadCallback(), TokenRoundingCallback(tile=4, start=3)]

    train(build("qwen3_moe"), tmp_path, callbacks=stretches(), attach=False)
    checkpoint = str(tmp_path / "checkpoint-4")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    train(model, tmp_path / "resumed", checkpoint, callbacks=stretches(), attach=False, max_steps=6)
    old = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    with pytest.raises(RuntimeError, match="experts of the resumed model"):
        train(old, tmp_path / "lost", checkpoint, callbacks=[rounding()], attach=False, max_steps=6)


def test_a_digest_of_an_earlier_step_handed_on_by_a_run_without_us_counts_for_nothing(tmp_path, messages):
    train(build("qwen3_moe"), tmp_path, attach=False, max_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    train(model, tmp_path, True, callbacks=[], attach=False)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["TokenRoundingCallback"]["attributes"][DIGEST]["step"] == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    train(model, tmp_path, True, attach=False, max_steps=6)
    assert len(messages.about("no digest of the experts")) == 1


def test_a_callback_added_while_training_does_not_stop_the_trainer_from_saving(tmp_path):
    class AddLate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.add_callback(ExpertLoadCallback())

    model = build("qwen3_moe")
    sonicmoe_hf.patch_model(model)
    trainer = trainer_for(model, tmp_path, [AddLate()], **SAVING)
    trainer.train()
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()


def test_a_digest_is_small_whatever_the_experts_size():
    sizes = [len(json.dumps(experts_digest(build("qwen3_moe", moe_intermediate_size=size)))) for size in (16, 64)]
    assert sizes[0] == sizes[1] < 1000
