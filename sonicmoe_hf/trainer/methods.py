"""Methods of one Trainer, wrapped in functions of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_method(trainer: Any, name: str, function: Callable) -> None:
    """Call `function(trainer, method, ...)` wherever the method `name` of this Trainer is called. Wrapping it again
    changes nothing."""
    method = getattr(trainer, name)
    if getattr(method, "func", None) is not function:
        setattr(trainer, name, functools.partial(function, trainer, method))
