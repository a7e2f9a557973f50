"""The errors that sonicmoe_hf raises beside ValueError and those of torch, and the warning of a public name that will
go."""

from __future__ import annotations

from typing_extensions import deprecated as marked


class CheckpointError(ValueError):
    """A checkpoint or an adapter that cannot be converted: the message names the file or tensor and the reason."""


class UnsupportedExpertsError(ValueError):
    """Experts compute something that sonicmoe_hf does not. The message names the class, the reason and the remedy."""


class UnsupportedModelError(ValueError):
    """A model, or some of its layers, cannot be patched or planned for: the message names the layers, the reason and the
    remedy."""


class UnlikeApartError(ValueError):
    """Sequences, or micro-batches, that would not be computed in one row as they are apart. The message names the reason
    and the remedy.

    reason: without the remedy.
    """

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason


def deprecated(until: str, instead: str) -> marked:
    """Mark a public function or class that will go: each call gives a FutureWarning (docs/api.md, Stability).

    Args:
        until: the version that will lack it; a test fails once that is the package's own.
        instead: what to use, as a clause: "use quantize_experts".
    """
    return marked(f"it goes in sonicmoe_hf {until}: {instead}", category=FutureWarning)
