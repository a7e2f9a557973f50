"""What the examples share: the small model and the text that they train without arguments, models with random weights of
any sizes (--random), and tokens per second with the peak memory."""

from __future__ import annotations

import time

import torch
from transformers import TrainerCallback

from sonicmoe_hf.demo.corpus import blocks, standard_library, train_tokenizer
from sonicmoe_hf.demo.model import (
    PER_LAYER_LOSS,
    VOCAB_SIZE,
    config_of,
    random_model,
    random_packed_model,
    small_config,
)

__all__ = [
    "PER_LAYER_LOSS",
    "VOCAB_SIZE",
    "Throughput",
    "ThroughputCallback",
    "blocks",
    "config_of",
    "random_model",
    "random_packed_model",
    "small_config",
    "standard_library",
    "train_tokenizer",
]

WARM_UP_STEPS = 2


class Throughput:
    """What a training run takes. Make it before the first step, and call `step` after each.

    Args:
        tokens: of a step, on this device. Padding would count, too.
    """

    def __init__(self, tokens: int):
        self.tokens, self.steps = tokens, 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.began = _seconds()

    def step(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self.steps == 1:
            self.until_first_step = _seconds() - self.began
        if self.steps == WARM_UP_STEPS:
            self.warm = _seconds()

    @property
    def timed_steps(self) -> int:
        """Those after the warm-up, which compiles kernels and allocates the optimiser's state."""
        return max(0, self.steps - WARM_UP_STEPS)

    def tokens_per_second(self) -> float:
        """Of the timed steps until now; there must be one."""
        return self.timed_steps * self.tokens / (_seconds() - self.warm)

    def __str__(self) -> str:
        line = f"{self.tokens_per_second():,.0f} tokens/s a device over {self.timed_steps} steps"
        line += f" of {self.tokens:,} tokens; first step after {self.until_first_step:.1f} s"
        if torch.cuda.is_available():
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            line += f"; peak {allocated / 2**30:.1f} GiB allocated, {reserved / 2**30:.1f} reserved"
        return line


class ThroughputCallback(TrainerCallback):
    """Prints a Trainer's `throughput` at the end of training, on the first rank.

    Args:
        sequence_length: tokens of each sequence of a batch.
    """

    def __init__(self, sequence_length: int):
        self.sequence_length = sequence_length

    def on_train_begin(self, args, state, control, **kwargs):
        sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.throughput = Throughput(sequences * self.sequence_length)

    def on_step_end(self, args, state, control, **kwargs):
        self.throughput.step()

    def on_train_end(self, args, state, control, **kwargs):
        if self.throughput.timed_steps and state.is_world_process_zero:
            print(self.throughput, flush=True)


def _seconds() -> float:
    """The clock, once the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
