"""Helpers of the tests of resumed and best models: training with checkpoints, and comparing weights bit for bit."""

import torch
from helpers.training import TILE, run_trainer
from transformers import TrainerCallback

from sonicmoe_hf import TokenRoundingCallback
from sonicmoe_hf.trainer.resume import restore

SAVING = {"save_strategy": "steps", "save_steps": 2}
BEST = {
    **SAVING,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "earliness",
    "greater_is_better": True,
}  # step 2 is the best


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(actual, expected):
    """Compare bit for bit."""
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def rounding():
    return TokenRoundingCallback(tile=TILE)


def train_and_save(model, folder, checkpoint=None, callbacks=None, attach=True, **options):
    """Train four steps, saving at 2 and 4, or go on from a checkpoint; returns the Trainer."""
    callbacks = [rounding()] if callbacks is None else callbacks
    options = {"learning_rate": 0.02, "optim": "adamw_torch", "weight_decay": 0.1, **SAVING, **options}
    return run_trainer(model, folder, [*callbacks, Earliness()], attach, checkpoint, count=24, **options)


def shard_checkpoints(model):
    """Make the Trainer write this model's checkpoints in many files with an index."""
    save = model.save_pretrained
    model.save_pretrained = lambda *args, **kwargs: save(*args, **{**kwargs, "max_shard_size": "30KB"})
    return model


class Earliness(TrainerCallback):
    """A metric that the first evaluation wins."""

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_earliness"] = -state.global_step


class Snapshots(TrainerCallback):
    """The weights after every step."""

    def __init__(self):
        self.at = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.at[state.global_step] = weights(model)


def restore_model(model, folder):
    restore(model, folder)
    return model
