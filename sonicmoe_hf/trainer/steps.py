"""What callbacks ask of a model's routers, asked while a Trainer's `training_step` runs and not after it.

An error or Ctrl-C ends `train()` without an event for callbacks. So nothing of theirs stays on between two steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import Trainer, TrainerState

from ..patching.patch import patch_state, router_hooks
from ..private.torch import has_checkpointing, has_compiled_parts

ASKED = {"policy": "token rounding", "counting": "counting", "balancing": "balancing"}
NOT_REPORTED = (
    "a training step ended, and no router of the model has done the {asked} that callbacks ask for: the step did not run "
    "the patched model's own layers. If it ran code compiled for another model, something set "
    "torch._dynamo.config.skip_nnmodule_hook_guards to True after patch_model; if it trained another model, give the "
    "Trainer that one"
)


class TrainingSteps:
    """`trainer.training_step` of one `train()`: it sets the model's PatchState for as long as a step runs.

    settings: {attribute of PatchState: its value}. run: the state of that `train()`; another leaves these settings alone.

    Raises, when called:
        RuntimeError: the settings ask something of the routers, and none of them has been called in training.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        own = vars(trainer).get("training_step")
        if isinstance(own, TrainingSteps):  # of a train() that an error ended
            own = own.own
        self.own: Callable | None = own
        self.run: TrainerState = trainer.state
        self.settings: dict[str, Any] = {}
        modules = [*trainer.model_wrapped.modules(), *trainer.model.modules()]
        # inside a compiled checkpoint a router cannot report: torch allows no effects there
        self.routers_report = not (has_compiled_parts(modules) and has_checkpointing(modules))

    def __call__(self, *args, **kwargs):
        step = type(self.trainer).training_step.__get__(self.trainer) if self.own is None else self.own
        if self.trainer.state is not self.run:
            return step(*args, **kwargs)
        model = self.trainer.model
        state = patch_state(model)
        before = {name: getattr(state, name) for name in self.settings}
        asked = [ASKED[name] for name, value in self.settings.items() if value]
        state.reports, state.reported = self.routers_report, False
        try:
            vars(state).update(self.settings)
            result = step(*args, **kwargs)
        finally:
            vars(state).update(before)
            reports, state.reports, state.last = state.reports, False, None
        if asked and reports and not state.reported and router_hooks(model):
            raise RuntimeError(NOT_REPORTED.format(asked=", ".join(asked)))
        return result

    def end(self) -> None:
        """The Trainer has its own training_step again, unless something was put around this one."""
        if vars(self.trainer).get("training_step") is self:
            del self.trainer.training_step
            if self.own is not None:
                self.trainer.training_step = self.own


def _running_trainer() -> Any:
    """The Trainer whose own training loop calls this, None where another loop does."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Trainer._inner_training_loop.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def ask(model: nn.Module, **settings) -> None:
    """From a callback: have the model's PatchState be so in every training step until `train()` ends. In a training loop
    that is not the Trainer's own, until `stop_asking`."""
    trainer = _running_trainer()
    if trainer is None:
        vars(patch_state(model)).update(settings)
        return
    steps = vars(trainer).get("training_step")
    if not isinstance(steps, TrainingSteps) or steps.run is not trainer.state:
        steps = trainer.training_step = TrainingSteps(trainer)
    steps.settings.update(settings)


def stop_asking(model: nn.Module, **settings) -> None:
    """From a callback at the end of training: `settings` are what these attributes of PatchState are without it."""
    trainer = _running_trainer()
    if trainer is None:
        vars(patch_state(model)).update(settings)
        return
    steps = vars(trainer).get("training_step")
    if isinstance(steps, TrainingSteps):
        steps.settings = {name: value for name, value in steps.settings.items() if name not in settings}
        if not steps.settings:
            steps.end()
