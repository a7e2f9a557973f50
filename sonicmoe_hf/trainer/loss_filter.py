"""The filter of losses that are NaN or infinite out of the logged loss, without waiting for each loss."""

from __future__ import annotations

from typing import Any

import torch

from ..private.transformers import mean_logged_loss
from .methods import WhileTraining, find_callback


class LossFilter(WhileTraining):
    """Filters losses that are NaN or infinite out of the logged loss, on the GPU. `attach` adds it.

    With logging_nan_inf_filter of its arguments, the default, a Trainer reads each micro-batch's loss in Python, and has
    the GPU compute nothing from its last kernel until gradients are clipped, the optimizer has stepped and the next
    micro-batch begins. The argument is off from a micro-batch's loss to the end of its step, and as it was for whatever
    evaluates, saves or logs.
    """

    def __init__(self) -> None:
        self.trains = False
        self.args: Any = None

    def begin(self, args: Any, model: Any) -> None:
        """Begin to filter losses."""
        self.trains = True

    def take(self, trainer: Any, loss: torch.Tensor) -> torch.Tensor:
        """Replace a loss [] that is NaN or infinite by the mean of those logged since, as the Trainer would."""
        if not self.trains or not trainer.args.logging_nan_inf_filter:
            return loss
        mean = mean_logged_loss(trainer)
        if mean.device != loss.device:  # the Trainer says so
            return loss
        self.args, trainer.args.logging_nan_inf_filter = trainer.args, False
        return torch.where(loss.isfinite(), loss, mean)

    def on_substep_end(self, args, state, control, **kwargs):
        """Put the argument back after a micro-batch that others of its step follow."""
        self._put_back()

    def on_step_end(self, args, state, control, **kwargs):
        """Put the argument back after the last one."""
        self._put_back()

    def end(self) -> None:
        """Filter no further loss, and put the argument back."""
        self.trains = False
        self._put_back()

    def _put_back(self) -> None:
        if self.args is not None:
            self.args.logging_nan_inf_filter = True
        self.args = None


def filtered_loss(trainer: Any, training_step: Any, *args, **kwargs) -> torch.Tensor:
    """Call `trainer.training_step`, and filter its loss."""
    loss, loss_filter = training_step(*args, **kwargs), find_callback(trainer, LossFilter)
    return loss if loss_filter is None else loss_filter.take(trainer, loss)
