"""Methods of one Trainer, called inside functions of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def put_around(trainer: Any, name: str, function: Callable) -> None:
    """Have `function(trainer, method, ...)` called wherever the method `name` of this Trainer is; doing so again changes
    nothing."""
    method = getattr(trainer, name)
    if getattr(method, "func", None) is not function:
        setattr(trainer, name, functools.partial(function, trainer, method))
