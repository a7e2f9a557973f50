"""expanded_memory of attach: packed experts lie expanded beside what is stored, while a Trainer trains."""

from __future__ import annotations

from typing import Any

from ..streaming.expanded_memory import ExpandedWeights, check_expanded_memory
from .methods import WhileTraining, find_callback


class ExpandedMemory(WhileTraining):
    """Keeps experts expanded from the beginning of training to its end. `attach` adds it to a Trainer."""

    def __init__(self, expanded_memory: str | int) -> None:
        self.expanded_memory = expanded_memory
        self.expanded: ExpandedWeights | None = None

    def begin(self, args: Any, model: Any) -> None:
        """Expand as many layers' experts as the memory holds."""
        if model is not None:
            self.expanded = ExpandedWeights(model, self.expanded_memory)

    def end(self) -> None:
        """Free the memory."""
        if self.expanded is not None:
            self.expanded.release()
        self.expanded = None


def add_expanded_memory(trainer, expanded_memory: str | int) -> None:
    """Add ExpandedMemory to a Trainer, or change the bytes of the one that it has. Raises as `ExpandedWeights` does."""
    check_expanded_memory(trainer.model, expanded_memory)
    if (callback := find_callback(trainer, ExpandedMemory)) is None:
        trainer.add_callback(ExpandedMemory(expanded_memory))
    else:
        callback.expanded_memory = expanded_memory
