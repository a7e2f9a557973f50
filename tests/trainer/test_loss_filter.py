"""logging_nan_inf_filter under `attach`: the Trainer's own sums, and no waiting for a loss."""

import sys

import pytest
import torch
from helpers.models import build_patched
from helpers.training import Examples, arguments
from transformers import Trainer, TrainerCallback

import sonicmoe_hf

BROKEN = {0: "nan", 3: "inf", 4: "nan"}  # by micro-batch: what its loss is besides; gradients stay as they are


class BrokenLosses(Trainer):
    """A Trainer some of whose losses are not finite."""

    calls = 0

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if not self.model.training:
            return loss
        broken = BROKEN.get(self.calls)
        self.calls += 1
        return loss if broken is None else loss + float(broken)


class Seen(TrainerCallback):
    """Notes the argument where others read it."""

    def __init__(self):
        self.values = []

    def note(self, args, *_, **__):
        self.values.append(args.logging_nan_inf_filter)

    on_log = on_save = on_evaluate = on_step_begin = on_step_end = on_substep_end = note


def trained(folder, attach, **options):
    seen = Seen()
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "logging_steps": 2, "eval_steps": 2, **options}
    args = arguments(folder, eval_strategy="steps", **settings)
    rows = Examples(32)
    trainer = BrokenLosses(build_patched("qwen3_moe"), args, train_dataset=rows, eval_dataset=rows, callbacks=[seen])
    if attach:
        sonicmoe_hf.attach(trainer)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], seen.values


@pytest.mark.parametrize("is_filtered", [True, False])
def test_the_logged_losses_are_the_trainers_and_it_reads_none(is_filtered, tmp_path, monkeypatch):
    read, isnan = [], torch.isnan
    is_of_trainer = lambda: sys._getframe(2).f_globals["__name__"] == "transformers.trainer"  # noqa: E731
    monkeypatch.setattr(torch, "isnan", lambda *args: (read.append(is_of_trainer()), isnan(*args))[1])
    expected, _ = trained(tmp_path, attach=False, logging_nan_inf_filter=is_filtered)
    assert any(read) == is_filtered
    read.clear()
    losses, seen = trained(tmp_path, attach=True, logging_nan_inf_filter=is_filtered)
    assert losses == pytest.approx(expected, rel=1e-6, nan_ok=True)  # fp32, the same sums
    assert bool(torch.tensor(losses).isfinite().all()) == is_filtered
    assert not any(read) and set(seen) == {is_filtered}


def test_the_argument_is_as_it_was_after_an_error(tmp_path):
    model = build_patched("qwen3_moe")
    trainer = Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=Examples(8))
    sonicmoe_hf.attach(trainer)

    class Fails(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            assert not args.logging_nan_inf_filter
            raise OSError("of a test")

    trainer.current_gradient_accumulation_steps = 1
    inputs = next(iter(trainer.get_train_dataloader()))
    assert trainer.training_step(trainer.model, inputs).isfinite(), "by hand, where nothing is logged"
    trainer.add_callback(Fails())
    with pytest.raises(OSError, match="of a test"):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter
