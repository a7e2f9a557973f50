"""Methods of one Trainer, wrapped in functions of ours, and its callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Callback = TypeVar("Callback")


def wrap_method(trainer: Any, name: str, function: Callable) -> None:
    """Call `function(trainer, method, ...)` wherever the method `name` of this Trainer is called. Wrapping it again
    changes nothing."""
    method = getattr(trainer, name)
    if getattr(method, "func", None) is not function:
        setattr(trainer, name, functools.partial(function, trainer, method))


def find_callback(trainer: Any, kind: type[Callback]) -> Callback | None:
    """Find the first callback of this class that a Trainer has; None without one."""
    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, kind)), None)
