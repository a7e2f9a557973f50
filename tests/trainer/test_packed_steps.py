"""Micro-batches of a step computed as one row: the losses and gradients of micro-batches one by one."""

from unittest import mock

import pytest
import torch
from helpers.adapters import with_lora
from helpers.marks import rest_slow
from helpers.models import assert_all_close, batch, build, build_patched
from helpers.training import run_trainer, trainer_for
from torch.nn.utils.rnn import pad_sequence

import sonicmoe_hf
from sonicmoe_hf import LoadBalancing, TokenRoundingCallback
from sonicmoe_hf.patching import experts
from sonicmoe_hf.trainer import compiled, packed_steps
from sonicmoe_hf.trainer.few_lengths import aligned_length, few_length
from sonicmoe_hf.trainer.methods import find_callback
from sonicmoe_hf.trainer.packed_steps import PackedSteps, check_rows_apart, packed

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
    model = build_patched("qwen3_moe")
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
    assert len(apart[0]) == 10 and [shape[0] for shape in whole[0]] == [1, 1, 1, 1]
    assert whole[0][0] == (1, aligned_length(tokens[0])), "no padding but up to a multiple of 8"
    few = run(tmp_path / "few", 1000, few_lengths=True)
    assert_same(few, apart)
    assert few[0][0] == (1, few_length(tokens[0]))
    in_two = run(tmp_path / "in_two", tokens[0] - 1)
    assert_same(in_two, apart)
    assert all(shape[1] < tokens[0] for shape in in_two[0]) and len(in_two[0]) > len(whole[0])
    assert_same(run(tmp_path / "whole", 1000, checkpoint=str(tmp_path / "whole" / "checkpoint-2")), apart)


def sequences(*lengths):
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 50, (length,), generator=generator)} for length in lengths]


def padded(rows):
    ids, labels = ([row["input_ids"] for row in rows] for _ in range(2))
    ids, labels = pad_sequence(ids, True, padding_value=0), pad_sequence(labels, True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).long()}


def compiled_trainer(folder, lengths, name="qwen3_moe", callbacks=(), adapters=False, **options):
    """Make a Trainer of micro-batches of two sequences, three a step, with torch_compile=True, and its calls."""
    model = build_patched(name, **({} if name == "nemotron_h" else {"num_hidden_layers": 1}))
    model = with_lora(model) if adapters else model
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "torch_compile": True, **options}
    trainer = trainer_for(model, folder, callbacks, num_train_epochs=1, **{"max_steps": -1, **options})
    trainer.train_dataset, trainer.data_collator = sequences(*lengths), padded
    return trainer, Calls(model)


@pytest.fixture
def messages(monkeypatch):
    """Record the warnings of packed_steps. torch_compile=True compiles nothing: what it packs is the same."""
    said = []
    monkeypatch.setattr(compiled, "compile_once", lambda *args, **kwargs: None)
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(packed_steps.logger, name, said.append)
    return said


LONG = (60, 55, 50, 50, 55, 55)  # 325 tokens


@pytest.mark.parametrize(
    ("few_lengths", "expected"), [(None, few_length(325)), (True, few_length(325)), (False, aligned_length(325))]
)
def test_rows_have_few_lengths_unless_they_are_to_have_none(few_lengths, expected, tmp_path):
    assert few_length(325) == 352 and aligned_length(325) == 328
    trainer, calls = compiled_trainer(tmp_path, LONG, torch_compile=False)
    sonicmoe_hf.attach(trainer, packed_tokens=1000, few_lengths=few_lengths)
    trainer.train()
    assert calls == [(1, expected)]


def test_rows_that_keep_a_gpu_busy_have_no_padding():
    steps = packed_steps.PackedSteps()
    steps.choose(8192, False, None)
    assert [steps._length(tokens) for tokens in (4001, 4097)] == [4096, 4104]
    steps.choose(None, False, True)
    assert steps._length(4097) == few_length(4097) == 4352


VARIED = 5, 4, 4, 3, 3, 3, 24, 3, 9, 4, 5, 4  # two steps
ALL = [(2, length) for length in (5, 4, 3, 24, 9, 5)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        # at most 16 of the first step's 9 + 7 and 6 tokens, 48 of the second's 27 + 13 and 9, in multiples of 8
        (VARIED, [(1, 16), (1, 8), (1, 40), (1, 16)]),
        ([8] * 6, [(2, 8)] * 3),
    ],
    ids=["varied", "one length"],
)
def test_torch_compile_packs_rows_of_what_the_largest_micro_batch_takes_anyway(lengths, expected, messages, tmp_path):
    found = {}
    for packed_tokens in (None, False):
        trainer, calls = compiled_trainer(tmp_path, lengths)
        sonicmoe_hf.attach(trainer, packed_tokens=packed_tokens)
        sonicmoe_hf.attach(trainer)  # as `sonicmoe-hf run` does, which changes nothing
        trainer.train()
        losses = [{"loss": log["loss"]} for log in trainer.state.log_history if "loss" in log]
        found[packed_tokens] = calls, losses, {name: each.detach() for name, each in trainer.model.named_parameters()}
    assert_same(found[None], found[False])
    assert found[None][0] == expected
    assert found[False][0] == (ALL if lengths is VARIED else expected)
    said = ["attach(trainer, packed_tokens=False) leaves that out"] if lengths is VARIED else []
    assert [message.rpartition("; ")[2] for message in messages] == said


@pytest.mark.parametrize(
    ("adapters", "is_before"),
    rest_slow([(True, True), (False, False), (False, True)]),
    ids=["PEFT", "after attach", "before"],
)
def test_layers_compiled_before_training_have_rows_as_with_torch_compile(adapters, is_before, messages, tmp_path):
    found = {}
    for packed_tokens in (None, False):
        torch._dynamo.reset()
        trainer, calls = compiled_trainer(tmp_path, VARIED, adapters=adapters, torch_compile=False)
        if is_before:
            sonicmoe_hf.compile_layers(trainer.model, backend="eager")
        sonicmoe_hf.attach(trainer, packed_tokens=packed_tokens)
        if not is_before:
            sonicmoe_hf.compile_layers(trainer.model, backend="eager")
        trainer.train()
        losses = [{"loss": log["loss"]} for log in trainer.state.log_history if "loss" in log]
        found[packed_tokens] = calls, losses, {name: each.detach() for name, each in trainer.model.named_parameters()}
    assert found[None][0] == [(1, 16), (1, 8), (1, 40), (1, 16)] and found[False][0] == ALL
    assert_same(found[None], found[False])
    assert messages == [packed_steps.PACKED]


def with_captured_layers(trainer):
    sonicmoe_hf.compile_layers(trainer.model, mode="reduce-overhead", backend=lambda graph, inputs, **options: graph)


def with_own_step(trainer):
    step = trainer.training_step
    trainer.training_step = lambda *args: step(*args)


def with_own_loss(trainer):
    loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: loss(*args, **kwargs)


def without_positions(trainer):
    forward = trainer.model.forward

    def only(input_ids=None, attention_mask=None, labels=None, use_cache=None, num_items_in_batch=None):
        return forward(input_ids, attention_mask, labels=labels, num_items_in_batch=num_items_in_batch)

    trainer.model.forward = only


def with_settings(**settings):
    return lambda trainer: vars(trainer.model.config).update(settings)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (None, {"name": "nemotron_h"}, "would mix the sequences of a row: "),
        (None, {"callbacks": [TokenRoundingCallback(tile=4)]}, "token rounding depends on"),
        (None, {"label_smoothing_factor": 0.1}, "label_smoothing_factor is another loss"),
        (None, {"neftune_noise_alpha": 5.0}, "NEFTune's noise"),
        (with_own_step, {}, "training_step is not the Trainer's own"),
        (with_own_loss, {}, "the loss is not the Trainer's own"),
        (None, {"torch_compile_mode": "reduce-overhead"}, "CUDA graphs (torch_compile_mode)"),
        (with_captured_layers, {"torch_compile": False}, "CUDA graphs (mode of compile_layers)"),
        (without_positions, {}, "takes no position_ids"),
        (with_settings(attention_chunk_size=64), {}, "counts its chunks"),
        (lambda trainer: trainer.model.set_attn_implementation("eager"), {}, "attention 'eager' may take more memory"),
        (lambda trainer: setattr(trainer.model, "loss_type", "ForMaskedLM"), {}, "is not that of next tokens"),
    ],
    ids=lambda each: next(iter(each), None) if isinstance(each, dict) else None,
)
def test_without_being_asked_what_cannot_be_packed_is_computed_apart_with_the_reason(
    change, options, reason, messages, tmp_path
):
    trainer, calls = compiled_trainer(tmp_path, VARIED, **options)
    if change is not None:
        change(trainer)
    sonicmoe_hf.attach(trainer)
    trainer.train()
    assert calls == ALL
    assert len(messages) == 1 and reason in messages[0] and "; " not in messages[0].partition(reason)[2]


def test_micro_batches_that_turn_out_to_be_no_rows_have_few_lengths_where_that_is_asked_for(messages, tmp_path):
    trainer, calls = compiled_trainer(tmp_path, VARIED, callbacks=[TokenRoundingCallback(tile=4)])
    sonicmoe_hf.attach(trainer, few_lengths=True)
    trainer.train()
    assert len(messages) == 1 and calls == [(count, few_length(length)) for count, length in ALL] != ALL


def test_a_row_is_as_its_micro_batches_for_eager_attention_too():
    batches = [batch(padding=True, seed=seed) for seed in (1, 2)]
    model = build_patched("qwen3_moe", attn_implementation="eager")
    check_rows_apart(model)
    items = sum((each["labels"][:, 1:] != -100).sum() for each in batches)
    losses = [model(**each, num_items_in_batch=items).loss for each in batches]
    torch.testing.assert_close(model(**packed(batches), num_items_in_batch=items).loss, sum(losses), rtol=1e-6, atol=0)


def test_whether_rows_are_as_apart_is_checked_without_the_experts(monkeypatch):
    """Few tokens have kernels of their own, which would compile for it."""
    model = with_lora(build_patched("qwen3_moe"))
    monkeypatch.setattr(experts, "moe_experts", calls := mock.Mock(wraps=experts.moe_experts))
    check_rows_apart(model)
    assert not calls.called
    model(**batch())
    assert calls.called, "they are back"


def test_while_rows_are_checked_the_experts_of_other_models_compute():
    """A thread may train one."""
    model, other, inputs = build_patched("qwen3_moe"), with_lora(build_patched("qwen3_moe")), batch()
    expected, seen = other(**inputs).logits, []
    model.register_forward_hook(lambda *_: seen.append(other(**inputs).logits))
    check_rows_apart(model)
    assert len(seen) == 2 and all(torch.equal(logits, expected) for logits in seen)


def test_models_whose_sequences_reach_over_borders_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"tokens of one sequence change the logits of the next one .* NemotronH.*linear attention"
    ):
        check_rows_apart(build("nemotron_h"))
    with pytest.raises(ValueError, match=r"NemotronH.* would mix .*no packed_tokens of attach\(trainer\)"):
        check_rows_apart(build_patched("nemotron_h"))  # as attach(trainer, packed_tokens=) does in the first step
    assert run_trainer(build("nemotron_h"), tmp_path, max_steps=1).state.global_step == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda each: {**each, "token_type_ids": each["input_ids"]}, "they have token_type_ids too"),
        (lambda each: {**each, "attention_mask": each["attention_mask"].flip(1)}, "padding comes before tokens"),
        (lambda each: {**each, "attention_mask": each["attention_mask"][:, None]}, "other shapes"),
    ],
)
def test_other_batches_are_computed_apart_with_the_reason(change, reason, tmp_path):
    trainer = trainer_for(build_patched("qwen3_moe"), tmp_path)
    sonicmoe_hf.attach(trainer, packed_tokens=100)
    batches = [change(batch(padding=True, seed=seed)) for seed in (1, 2)]
    with mock.patch.object(packed_steps.logger, "warning_once") as warn:
        trainer.get_batch_samples(iter(batches), 2, torch.device("cpu"))
    callback = find_callback(trainer, PackedSteps)
    assert not callback.rows and not callback.without_loss
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
    trainer = trainer_for(build_patched("qwen3_moe"), tmp_path, callbacks, gradient_accumulation_steps=2, **options)
    sonicmoe_hf.attach(trainer, packed_tokens=1000)
    with pytest.raises(ValueError, match=f"cannot be packed: .*{reason}.*leave packed_tokens"):
        trainer.train()


def test_a_row_of_less_than_no_tokens_is_refused_at_once(tmp_path):
    trainer = trainer_for(build_patched("qwen3_moe"), tmp_path)
    with pytest.raises(ValueError, match="packed_tokens is -1"):
        sonicmoe_hf.attach(trainer, packed_tokens=-1)
    assert find_callback(trainer, PackedSteps) is None


def steps_of_rank(rank, folder, packed_tokens):
    model = build_patched("qwen3_moe")
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
    """The first rank has the sequences without padding, of which three are a row of 72 tokens
    and the fourth is another."""
    apart, whole = (ranks.run(steps_of_rank, str(tmp_path), tokens) for tokens in (None, 80))
    for (losses, weights), (expected, expected_weights) in zip(whole, apart, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6), ORDER_OF_SUMS
        assert_all_close(weights, expected_weights, 1e-6, ORDER_OF_SUMS)
