"""Tokens per second and peak memory of a Trainer's run."""

from __future__ import annotations

import time

import torch
from transformers import TrainerCallback

WARM_UP_STEPS = 2  # compile kernels and allocate the optimiser's state


class ThroughputCallback(TrainerCallback):
    """Prints what a run took, on the first rank; `tokens_per_second` and `peak_GiB` keep it (None before its end).

    Args:
        sequence_length: tokens of each sequence of a batch. Padding would count, too.
    """

    def __init__(self, sequence_length: int):
        self.sequence_length = sequence_length
        self.tokens_per_second: float | None = None
        self.peak_GiB: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.began = _seconds()
        self.first_step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        steps = state.global_step - self.first_step
        if steps == 1:
            self.until_first_step = _seconds() - self.began
        if steps == WARM_UP_STEPS:
            self.warm = _seconds()

    def on_train_end(self, args, state, control, **kwargs):
        timed_steps = state.global_step - self.first_step - WARM_UP_STEPS
        if timed_steps < 1:
            return
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
        tokens = timed_steps * sequences * self.sequence_length
        self.tokens_per_second = tokens / (_seconds() - self.warm)
        line = f"{self.tokens_per_second:,.0f} tokens/s a device over {timed_steps} steps"
        line += f" of {sequences * self.sequence_length:,} tokens; first step after {self.until_first_step:.1f} s"
        if torch.cuda.is_available():
            self.peak_GiB = torch.cuda.max_memory_allocated() / 2**30
            line += (
                f"; peak {self.peak_GiB:.1f} GiB allocated, {torch.cuda.max_memory_reserved() / 2**30:.1f} reserved"
            )
        if state.is_world_process_zero:
            print(line, flush=True)


def _seconds() -> float:
    """The clock, once the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
