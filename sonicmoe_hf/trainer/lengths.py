"""Lengths of micro-batches that vary: attention and compiled layers for all of them."""

from __future__ import annotations

from typing import Any

import torch

from ..compiling.layers import expect_lengths
from ..private.torch import has_compiled_modules, mark_as_any_size
from .methods import WhileTraining

OBSERVED = 8  # micro-batches, in which a choice is made
FEW_TOKENS = 8192  # of a micro-batch; attention of more takes the GPU longer than planning takes the host


class VaryingLengths(WhileTraining):
    """Observes the lengths of a run's micro-batches, and prepares attention and compiled layers for those to come.
    `attach` adds it to a Trainer.

    cuDNN's attention, which torch prefers on Hopper, plans for some 80 ms whenever a length is new. Where most of the
    first micro-batches have new lengths and few tokens, it is off until the run ends. Compiled code keeps the attention
    that it was compiled with, so there it is off from the second length on, for which torch compiles for any.

    Where the micro-batches of the first step have several lengths, layers are compiled for any at once.
    """

    def __init__(self) -> None:
        self.few_lengths: bool | None = None  # what `attach` was given
        self.has_disabled_cudnn = False
        self._forget()

    def _forget(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()
        self.num_observed = self.num_tokens = 0  # micro-batches, and the tokens in them
        # anything in the model, or by the Trainer the whole; whether its compiled layers take any length
        self.is_compiled = self.takes_any_length = False

    def begin(self, args: Any, model: Any) -> None:
        """Begin to observe a run's lengths."""
        self._forget()
        modules = [] if model is None else list(model.modules())
        self.is_compiled = getattr(args, "torch_compile", False) or has_compiled_modules(modules)

    def expect(self, model, batches: list, masks: list[torch.Tensor]) -> None:
        """Let compiled layers take any length from their first call on, where micro-batches are packed, or a step's have
        several lengths.

        masks: [1, N], of the rows in which the micro-batches are packed.
        """
        if self.is_compiled and not self.takes_any_length:
            columns = [batch.get("input_ids") if hasattr(batch, "get") else None for batch in batches]
            lengths = {ids.shape[-1] for ids in columns if isinstance(ids, torch.Tensor)}
            self.takes_any_length = bool(masks) or len(lengths) > 1
            if self.takes_any_length:
                expect_lengths(model)
        if self.takes_any_length:
            for mask in masks:  # which compiled layers read beside their arguments
                mark_as_any_size(mask, 1)

    def note(self, inputs) -> None:
        """Observe the sizes of a training micro-batch."""
        ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
        if self.num_observed >= OBSERVED or not isinstance(ids, torch.Tensor):
            return
        self.num_observed += 1
        self.num_tokens += ids.numel()
        self.shapes.add(tuple(ids.shape))
        if self.takes_any_length:
            for column in inputs.values():  # a mask is also read in compiled layers
                if isinstance(column, torch.Tensor) and column.shape == ids.shape and ids.shape[-1] > 1:
                    mark_as_any_size(column, column.dim() - 1)
        varies = len(self.shapes) > (1 if self.is_compiled else OBSERVED // 2)
        are_short = self.num_tokens <= self.num_observed * FEW_TOKENS
        if varies and are_short and torch.backends.cuda.cudnn_sdp_enabled():
            torch.backends.cuda.enable_cudnn_sdp(False)
            self.has_disabled_cudnn = True

    def end(self) -> None:
        """Put cuDNN's attention back as it was."""
        if self.has_disabled_cudnn:
            torch.backends.cuda.enable_cudnn_sdp(True)
        self.has_disabled_cudnn = False
