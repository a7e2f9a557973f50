"""Micro-batches padded to a few lengths: the losses and gradients of those as they come, in fewer sizes."""

import pytest
import torch
from helpers.models import assert_all_close, batch, build_patched
from helpers.training import trainer_for
from transformers.modeling_utils import PreTrainedModel

import sonicmoe_hf
from sonicmoe_hf.trainer.few_lengths import few_length

ORDER_OF_SUMS = "fp32, and attention over padding that weighs nothing"


def test_padding_adds_less_than_a_tenth_or_8_tokens_and_leaves_ten_lengths_between_one_and_its_double():
    lengths = {length: few_length(length) for length in range(1, 2100)}
    assert all(length <= padded < max(1.1 * length, length + 8) for length, padded in lengths.items())
    assert all(few_length(padded) == padded for padded in lengths.values())
    assert max(len({lengths[each] for each in range(start, 2 * start)}) for start in range(20, 1050)) <= 11
    assert few_length(2048) == 2048


class Calls(list):
    """The columns of a model's training calls."""

    def __init__(self, model):
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model, args, kwargs):
        if model.training:
            self.append(
                {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor) and value.dim()}
            )


def run(folder, few_lengths, columns=(), **options):
    """Train two steps of micro-batches of two rows, each a token shorter than the one before."""
    model = build_patched("qwen3_moe")
    calls, lengths = Calls(model), iter(range(49, 40, -1))
    padded = batch(rows=8, length=49, padding=True)
    rows = [{name: column[row] for name, column in padded.items()} for row in range(8)]

    def collate(rows):
        length = next(lengths)
        found = {name: torch.stack([row[name] for row in rows])[:, :length] for name in rows[0]}
        return found | {name: make(found["input_ids"]) for name, make in columns}

    trainer = trainer_for(
        model, folder, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, **options
    )
    trainer.train_dataset, trainer.data_collator = rows, collate
    sonicmoe_hf.attach(trainer, few_lengths=few_lengths)
    trainer.train()
    return calls, trainer, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.pinned
def test_padded_micro_batches_train_as_they_come(tmp_path):
    """Losses, the load of experts and two steps of AdamW, whose gradients divide by tokens with labels."""
    (found, trainer, weights), (calls, expected, expected_weights) = (run(tmp_path, few) for few in (True, None))
    assert [call["input_ids"].shape[1] for call in calls] == [49, 48, 47, 46]
    assert [call["input_ids"].shape[1] for call in found] == [56, 48, 48, 48]
    for call, plain in zip(found, calls):
        length = plain["input_ids"].shape[1]
        assert all(call[name][:, :length].equal(column) for name, column in plain.items())
        assert not call["attention_mask"][:, length:].any()
    names = "loss", "grad_norm", "moe/load_max_over_mean", "total_flos"
    for log, other in zip(trainer.state.log_history, expected.state.log_history):
        assert {name: log[name] for name in names if name in log} == pytest.approx(
            {name: other[name] for name in names if name in other}, rel=1e-6
        ), ORDER_OF_SUMS
    assert_all_close(weights, expected_weights, 1e-6, ORDER_OF_SUMS)


def test_batches_with_positions_keep_their_lengths(tmp_path):
    positions = ("position_ids", lambda ids: torch.arange(ids.shape[1]).expand_as(ids))
    calls, _, _ = run(tmp_path, True, columns=[positions])
    assert [call["input_ids"].shape[1] for call in calls] == [49, 48, 47, 46]


@pytest.mark.pinned
def test_parameters_are_counted_once_a_run(tmp_path, monkeypatch):
    counted = []
    num_parameters = PreTrainedModel.num_parameters
    monkeypatch.setattr(
        PreTrainedModel, "num_parameters", lambda *args, **kwargs: counted.append(1) or num_parameters(*args, **kwargs)
    )
    totals = []
    for attached in (True, False):
        trainer = trainer_for(build_patched("qwen3_moe"), tmp_path, max_steps=3)
        before = len(counted)
        if attached:
            sonicmoe_hf.attach(trainer)
        trainer.train()
        totals.append((trainer.state.total_flos, len(counted) - before))
    (flops, once), (expected, thrice) = totals
    assert flops == expected > 0 and thrice - once == 2
