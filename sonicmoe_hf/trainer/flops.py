"""Floating-point operations that a Trainer counts of each micro-batch."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .methods import find_callback


class FlopsPerToken(TrainerCallback):
    """Keeps the FLOPs a token of a run's first micro-batch: a Trainer counts the parameters of all modules each time,
    which takes longer than Python has while a GPU computes a small step."""

    def __init__(self) -> None:
        self.flops_per_token: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Count again in this run."""
        self.flops_per_token = None


def count_flops(trainer: Any, floating_point_ops, inputs: Any) -> float:
    """Call `trainer.floating_point_ops` once a run, and else compute it from the tokens of a micro-batch."""
    callback = find_callback(trainer, FlopsPerToken)
    ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
    if callback is None or ids is None or getattr(trainer.model, "main_input_name", "input_ids") != "input_ids":
        return floating_point_ops(inputs)
    if callback.flops_per_token is None:
        callback.flops_per_token = floating_point_ops(inputs) / max(ids.numel(), 1)
    return callback.flops_per_token * ids.numel()
