"""Methods of one Trainer, wrapped in functions of ours, and its callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback

Callback = TypeVar("Callback")


def wrap_method(trainer: Any, name: str, function: Callable) -> None:
    """Call `function(trainer, method, ...)` wherever the method `name` of this Trainer is called. Wrapping it again
    changes nothing."""
    method = getattr(trainer, name)
    if getattr(method, "func", None) is not function:
        setattr(trainer, name, functools.partial(function, trainer, method))


def unwrap_method(trainer: Any, name: str, function: Callable) -> None:
    """Undo `wrap_method`, if nobody has wrapped the method since."""
    method = vars(trainer).get(name)
    if getattr(method, "func", None) is function:
        setattr(trainer, name, method.args[1])


def is_own(trainer: Any, name: str) -> bool:
    """Tell whether a Trainer's method is that of Transformers, which functions of ours may wrap."""
    method = getattr(trainer, name)
    while isinstance(method, functools.partial) and method.args and method.args[0] is trainer:
        method = method.args[1]
    return getattr(method, "__func__", None) is getattr(Trainer, name)


def find_callback(trainer: Any, kind: type[Callback]) -> Callback | None:
    """Find the first callback of this class that a Trainer has; None without one."""
    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, kind)), None)


class WhileTraining(TrainerCallback):
    """Callback whose settings hold while a Trainer trains. `attach` ends it with `trainer.train`, after an error or
    Ctrl-C too."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """End an attempt with a larger batch (auto_find_batch_size), and begin this one."""
        self.end()
        self.begin(args, model)

    def begin(self, args: Any, model: Any) -> None:
        """Make the settings for a run of this model, or of None."""
        raise NotImplementedError

    def end(self) -> None:
        """Put back what was before; without effect where nothing has begun."""
        raise NotImplementedError
