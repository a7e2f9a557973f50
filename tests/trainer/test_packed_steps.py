"""Micro-batches of a step computed as one row: the losses and gradients of micro-batches one by one."""

from unittest import mock

import pytest
import torch
from helpers.models import assert_all_close, batch, build, patched
from helpers.training import trainer_for

import sonicmoe_hf
from sonicmoe_hf import LoadBalancing, TokenRoundingCallback
from sonicmoe_hf.trainer import packed_steps
from sonicmoe_hf.trainer.few_lengths import aligned_length, few_length
from sonicmoe_hf.trainer.packed_steps import check_rows_apart, packed

ORDER_OF_SUMS = "fp32, a step's sums in another order, and two layers of attention with another mask"
FIVE_OF_FOUR = {  # five micro-batches an epoch: the second step of each has one
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 2,
    "max_steps": -1,
    "include_num_input_tokens_seen": "non_padding",
}
NAMES = "loss", "eval_loss", "num_input_tokens_seen", "epoch", "moe/load_max_over_mean"


class Calls(list):
    """The shapes of the input_ids of a model's training calls."""

    def __init__(self, model):
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model, args, kwargs):
        if model.training:
            self.append(tuple(kwargs["input_ids"].shape))


def run(folder, packed_tokens, checkpoint=None, few_lengths=None, **options):
    model = patched("qwen3_moe")
    calls = Calls(model)
    options = {**FIVE_OF_FOUR, "eval_strategy": "epoch", "save_strategy": "epoch", **options}
    trainer = trainer_for(model, folder, padding=True, count=10, **options)
    sonicmoe_hf.attach(trainer, packed_tokens=packed_tokens, few_lengths=few_lengths)
    trainer.train(resume_from_checkpoint=checkpoint)
    found = [{name: log[name] for name in NAMES if name in log} for log in trainer.state.log_history]
    return calls, found, {name: weight.detach() for name, weight in model.named_parameters()}


def assert_same(found, expected):
    assert found[1] == [pytest.approx(log, rel=1e-6) for log in expected[1]], ORDER_OF_SUMS
    assert_all_close(found[2], expected[2], 1e-6, ORDER_OF_SUMS)


def test_packed_steps_train_as_micro_batches_apart_over_epochs_and_after_a_resumption(tmp_path):
    apart = run(tmp_path / "apart", None)
    whole = run(tmp_path / "whole", 1000)
    assert_same(whole, apart)
    tokens = [log["num_input_tokens_seen"] for log in apart[1] if "loss" in log]
    assert len(apart[0]) == 10 and [shape[0] for shape in whole[0]] == [1, 2, 1, 2]
    assert whole[0][0] == (1, aligned_length(tokens[0])), "no padding but up to a multiple of 8"
    few = run(tmp_path / "few", 1000, few_lengths=True)
    assert_same(few, apart)
    assert few[0][0] == (1, few_length(tokens[0]))
    in_two = run(tmp_path / "in_two", tokens[0] - 1)
    assert_same(in_two, apart)
    assert all(shape[1] < tokens[0] for shape in in_two[0]) and len(in_two[0]) > len(whole[0])
    assert_same(run(tmp_path / "whole", 1000, checkpoint=str(tmp_path / "whole" / "checkpoint-2")), apart)


def test_a_row_is_as_its_micro_batches_for_eager_attention_too():
    batches = [batch(padding=True, seed=seed) for seed in (1, 2)]
    model = patched("qwen3_moe", attn_implementation="eager")
    check_rows_apart(model)
    items = sum((each["labels"][:, 1:] != -100).sum() for each in batches)
    losses = [model(**each, num_items_in_batch=items).loss for each in batches]
    torch.testing.assert_close(model(**packed(batches), num_items_in_batch=items).loss, sum(losses), rtol=1e-6, atol=0)


def test_models_whose_sequences_reach_over_borders_are_refused():
    with pytest.raises(ValueError, match=r"change the logits of the next one .* NemotronH.*linear attention"):
        check_rows_apart(build("nemotron_h"))
    with pytest.raises(ValueError, match=r"NemotronH.* would mix .*no packed_tokens of attach\(trainer\)"):
        check_rows_apart(patched("nemotron_h"))  # as attach(trainer, packed_tokens=) does in the first step


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda each: {**each, "token_type_ids": each["input_ids"]}, "they have token_type_ids too"),
        (lambda each: {**each, "attention_mask": each["attention_mask"].flip(1)}, "padding comes before tokens"),
        (lambda each: {**each, "attention_mask": each["attention_mask"][:, None]}, "other shapes"),
    ],
)
def test_other_batches_are_computed_apart_with_the_reason(change, reason, tmp_path):
    trainer = trainer_for(patched("qwen3_moe"), tmp_path)
    sonicmoe_hf.attach(trainer, packed_tokens=100)
    batches = [change(batch(padding=True, seed=seed)) for seed in (1, 2)]
    with mock.patch.object(packed_steps.logger, "warning_once") as warn:
        trainer.get_batch_samples(iter(batches), 2, torch.device("cpu"))
    callback = trainer.callback_handler.callbacks[-1]
    assert not callback.rows and not callback.later
    assert reason in warn.call_args.args[0]


@pytest.mark.pinned
@pytest.mark.parametrize(
    ("options", "callbacks", "reason"),
    [
        ({"label_smoothing_factor": 0.1}, [], "label_smoothing_factor"),
        ({}, [LoadBalancing(per_layer_loss=0.1)], "balancing loss"),
        ({}, [TokenRoundingCallback(tile=4)], "token rounding"),
    ],
)
def test_losses_that_are_no_sum_over_tokens_are_refused(options, callbacks, reason, tmp_path):
    trainer = trainer_for(patched("qwen3_moe"), tmp_path, callbacks, gradient_accumulation_steps=2, **options)
    sonicmoe_hf.attach(trainer, packed_tokens=1000)
    with pytest.raises(ValueError, match=f"cannot be packed: .*{reason}.*leave packed_tokens"):
        trainer.train()


def test_a_row_of_no_tokens_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match="packed_tokens is 0"):
        sonicmoe_hf.attach(trainer_for(patched("qwen3_moe"), tmp_path), packed_tokens=0)


def steps_of_rank(rank, folder, packed_tokens):
    model = patched("qwen3_moe")
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "max_steps": 2,
        "save_strategy": "no",
    }
    trainer = trainer_for(model, folder, padding=True, count=16, **options)
    sonicmoe_hf.attach(trainer, packed_tokens=packed_tokens)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def test_ranks_of_ddp_with_different_numbers_of_rows_train_as_apart(ranks, tmp_path):
    """The first rank has the sequences without padding, of which three are a row of 72 tokens and the fourth is another."""
    apart, whole = (ranks.run(steps_of_rank, str(tmp_path), tokens) for tokens in (None, 80))
    for (losses, weights), (expected, expected_weights) in zip(whole, apart, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6), ORDER_OF_SUMS
        assert_all_close(weights, expected_weights, 1e-6, ORDER_OF_SUMS)
