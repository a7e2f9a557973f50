"""The scale of the balancing loss where a Trainer computes its loss outside the model, as TRL's do."""

from __future__ import annotations

from typing import Any

import torch

from ..routing.call_scale import ScaleHook, count_labels
from ..routing.patched_model import find_state
from ..routing.state import ModelCall


def loss_with_scale(trainer: Any, compute_loss: Any, model, inputs, *args, **kwargs) -> Any:
    """Call `trainer.compute_loss`, whose result tells the model's training calls in it how training scales them.

    Several calls, as of GRPO's chunks, are averaged. A loss that the model itself returns tells its own call more
    precisely, and wins.
    """
    state = find_state(trainer.model)
    if state is None or state.balancing is None or not state.balancing.loss_weight:
        return compute_loss(model, inputs, *args, **kwargs)
    # before the Trainer takes the labels out
    share = _share_of_step(trainer, inputs, kwargs.get("num_items_in_batch"))
    calls: list[ModelCall] = []
    state.step.calls_of_loss = calls
    try:
        result = compute_loss(model, inputs, *args, **kwargs)
    finally:
        state.step.calls_of_loss = None
    loss = result[0] if isinstance(result, tuple) else result
    if calls and loss.requires_grad:
        loss.register_hook(ScaleHook(calls, share / len(calls)))
    return result


def _share_of_step(trainer: Any, inputs, num_items: torch.Tensor | int | None) -> torch.Tensor | float:
    """Compute the fraction of an optimiser step that this micro-batch is, where the loss is divided for the whole step;
    1.0 where the Trainer divides it afterwards. As in Trainer.training_step and compute_loss."""
    is_divided = getattr(trainer, "loss_is_scaled_for_ga", None)  # since 5.19
    if is_divided is None:
        by_items = trainer.model_accepts_loss_kwargs and num_items is not None
        is_divided = by_items or trainer.compute_loss_func is not None
    if not is_divided:
        return 1.0
    labels = None if num_items is None else count_labels(trainer.accelerator.unwrap_model(trainer.model), inputs)
    if labels is None:
        return 1.0 / trainer.current_gradient_accumulation_steps
    share = labels / torch.as_tensor(num_items, dtype=torch.int64, device=labels.device).clamp(min=1)
    if trainer.args.average_tokens_across_devices:  # DDP averages what was divided by the tokens of all ranks
        share = share * (trainer.accelerator.num_processes // trainer.get_tp_size())
    return share
