"""train() and parameters() of a model that a Trainer trains: torch's results, without torch's calls for each module."""

import copy
import pickle

import pytest
import torch
from helpers.models import build_patched
from helpers.training import fail_in, trainer_for
from torch import nn
from transformers import TrainerCallback

import sonicmoe_hf
from sonicmoe_hf.trainer.module_walks import ModuleWalks

NAMES = {"train", "parameters"}


def tied() -> nn.Module:
    """Build modules of which one is there twice, one is None, and two share a parameter."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)))
    model.add_module("none", None)
    model.add_module("again", model[0])
    model.append(nn.Linear(2, 2))
    model[-1].weight = model[1][0].weight
    model.scale = nn.Parameter(torch.ones(1))
    return model


def begun(model) -> ModuleWalks:
    walks = ModuleWalks()
    walks.on_train_begin(None, None, None, model=model)
    return walks


def test_parameters_and_modes_are_torchs():
    model = tied()
    expected = [id(p) for p in model.parameters()], [id(p) for p in model.parameters(recurse=False)]
    walks = begun(model)
    assert vars(model).keys() >= NAMES
    assert ([id(p) for p in model.parameters()], [id(p) for p in model.parameters(recurse=False)]) == expected
    for mode in (False, True):
        model[1][1].training = not mode  # one module alone is in another mode
        assert model.train(mode) is model and {module.training for module in model.modules()} == {mode}
    assert not model.eval()[1][1].training
    with pytest.raises(ValueError, match="expected to be boolean"):
        model.train(1)
    walks.end()
    assert not vars(model).keys() & NAMES


class Frozen(nn.BatchNorm1d):
    """A norm that never trains."""

    def train(self, mode=True):
        return super().train(False)


class Fewer(nn.Linear):
    """A layer that hides parameters."""

    def named_parameters(self, *args, **kwargs):
        return iter(())


def test_methods_that_somebody_has_written_stay():
    model = nn.Sequential(Frozen(2), nn.Linear(2, 2))
    begun(model)
    assert vars(model).keys() & NAMES == {"parameters"} and not model.train()[0].training
    begun(model := nn.Sequential(Fewer(2, 2)))
    assert vars(model).keys() & NAMES == {"train"}
    model = nn.Linear(2, 2)
    model.train = mine = lambda mode=True: model
    walks = begun(model)
    walks.end()
    assert model.train is mine


def test_copies_have_their_own_modules():
    model = tied()
    begun(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.eval()
        assert model[0].training and not copied[0].training
        assert not {id(p) for p in model.parameters()} & {id(p) for p in copied.parameters()}


class CallsOfStep(TrainerCallback):
    """Counts torch's calls of two methods of modules from the end of the first step to the end of the last, or lets the
    second step fail."""

    def __init__(self, monkeypatch, fails):
        self.monkeypatch, self.counts, self.fails = monkeypatch, {"train": 0, "named_parameters": 0}, fails

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if self.fails and state.global_step:
            fail_in(model, OSError("of a test"))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.attributes = vars(model).keys() & NAMES
        for name in self.counts if state.global_step == 1 else ():
            self.monkeypatch.setattr(nn.Module, name, self.counting(name, getattr(nn.Module, name)))

    def counting(self, name, method):
        def run(module, *args, **kwargs):
            self.counts[name] += 1
            return method(module, *args, **kwargs)

        return run


@pytest.mark.parametrize("fails", [False, True])
def test_steps_of_a_trainer_call_no_method_for_each_module(fails, tmp_path, monkeypatch):
    model = build_patched("qwen3_moe")
    calls = CallsOfStep(monkeypatch, fails)
    trainer = trainer_for(model, tmp_path, callbacks=[calls], max_steps=3)
    sonicmoe_hf.attach(trainer)
    if fails:
        with pytest.raises(OSError, match="of a test"):
            trainer.train()
    else:
        trainer.train()
        assert calls.counts == {"train": 0, "named_parameters": 0}
    assert calls.attributes == NAMES and not vars(model).keys() & NAMES
