"""The scale that training gives a model call, and with it the balancing loss in it: by the gradient of its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from .state import ModelCall


def _is_causal(model: Any) -> bool:
    """Tell whether the model's loss shifts its labels: the Trainer's own test."""
    loss_function = LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), ForCausalLMLoss)
    return loss_function is ForCausalLMLoss and not getattr(model.config, "is_encoder_decoder", False)


def count_labels(model: nn.Module, inputs) -> torch.Tensor | None:
    """Count the labels of a batch as the Trainer does for num_items_in_batch, in fp32; None where it has none."""
    labels: Any = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        labels = labels[..., 1:] if labels is not None and _is_causal(model) else labels
    return None if labels is None else (labels != -100).sum(dtype=torch.float32)


def share_of_batch(model: nn.Module, kwargs: dict) -> torch.Tensor | float:
    """Compute the fraction of the optimiser step's tokens that a model call with these arguments has, where the model
    divides its loss by their number, num_items_in_batch (as the Trainer has it do); 1.0 otherwise, where the loss is
    scaled as a whole.

    Of the models with experts only causal language models divide by it: classification heads return a mean.
    """
    num_items: torch.Tensor | int | None = kwargs.get("num_items_in_batch")
    if num_items is None or not _is_causal(model):
        return 1.0
    labels = count_labels(model, kwargs)
    return 1.0 if labels is None else labels / num_items


class ScaleHook:
    """Hook of a loss: its gradient, times `share`, says how training scales these calls. DDP hands None to the hooks of
    outputs that training does not use."""

    def __init__(self, calls: list[ModelCall], share: torch.Tensor | float):
        self.calls, self.share = calls, share

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        share = self.share.to(gradient.device) if isinstance(self.share, torch.Tensor) else self.share
        for call in self.calls:
            call.loss_scale = gradient.detach().float() * share


def hook_loss(call: ModelCall, output) -> None:
    """Learn the scale of an outermost call from the gradient of the loss that it returned, if it did."""
    loss = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else None
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
        loss.register_hook(ScaleHook([call], call.share))
