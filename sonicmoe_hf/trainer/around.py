"""Methods of one Trainer, called inside functions of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Around:
    """A Trainer's method, in whose place `function(trainer, method, ...)` is called."""

    def __init__(self, trainer: Any, name: str, function: Callable):
        self.trainer, self.method, self.function = trainer, getattr(trainer, name), function

    def __call__(self, *args, **kwargs):
        return self.function(self.trainer, self.method, *args, **kwargs)


def put_around(trainer: Any, name: str, function: Callable) -> None:
    """Have `function(trainer, method, ...)` called wherever the method `name` of this Trainer is; only the first such
    call for a method has an effect."""
    if not isinstance(getattr(trainer, name), _Around):
        setattr(trainer, name, _Around(trainer, name, function))
