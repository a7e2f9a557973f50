"""Which adapters the experts of this thread's calls are to compute with, from whoever wraps the experts (PEFT)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

from ..low_rank import LowRank

_thread = threading.local()  # given: (experts, parameter name, adapters) of each wrapper in whose forward we are


@contextlib.contextmanager
def given(experts: nn.Module, parameter_name: str, adapters: list[LowRank]) -> Iterator[None]:
    """Calls of `experts` inside, in this thread, add `adapters` to that parameter."""
    outer = getattr(_thread, "given", ())
    _thread.given = (*outer, (experts, parameter_name, adapters))
    try:
        yield
    finally:
        _thread.given = outer


def adapters_of(experts: nn.Module, parameter_name: str) -> list[LowRank] | None:
    """What `given` says in this thread."""
    for module, name, adapters in getattr(_thread, "given", ()):
        if module is experts and name == parameter_name:
            return adapters
    return None
