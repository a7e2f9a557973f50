"""Which adapters the experts of this thread's calls are to compute with, from whoever wraps the experts (PEFT)."""

from __future__ import annotations

import threading

from torch import nn

from ..layer.lora_operands import LowRank

_thread = threading.local()  # given: (experts, parameter name, adapters) of each wrapper in whose forward we are


class ActiveAdapters:
    """`with ActiveAdapters(...)`: calls of `experts` inside, in this thread, add `adapters` to that parameter."""

    def __init__(self, experts: nn.Module, parameter_name: str, adapters: list[LowRank]):
        self.entry = experts, parameter_name, adapters

    def __enter__(self) -> None:
        self.outer = getattr(_thread, "given", ())
        _thread.given = (*self.outer, self.entry)

    def __exit__(self, *_) -> None:
        _thread.given = self.outer


def adapters_of(experts: nn.Module, parameter_names: tuple[str, str]) -> list[list[LowRank] | None]:
    """What `ActiveAdapters` says in this thread of each of the experts' weights."""
    adapters: list[list[LowRank] | None] = [None, None]
    for module, name, given in reversed(getattr(_thread, "given", ())):  # the outermost counts
        if module is experts and name in parameter_names:
            adapters[parameter_names.index(name)] = given
    return adapters
