"""Advice to those whose GPU waits for Python, as it does in small training steps."""

from __future__ import annotations

import statistics

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..compiling.layers import can_capture, why_in_python
from ..kernels.announce import is_first_rank
from .lengths import VaryingLengths
from .packed_steps import PADDED_FIRST, PackedSteps

logger = logging.get_logger(__name__)

SAMPLED_STEPS = range(6, 11)  # of a run: the first ones compile
BUSY = 60  # percent
ADVICE = "sonicmoe_hf: the GPU is busy {busy}% of the time, and waits for Python in the rest. What helps: {switches}"
COMPILE = (
    "torch_compile=True in the Trainer's arguments, attach(trainer, compile=True) or `sonicmoe-hf run --compile`, which "
    "compile each layer"
)
PACK = "attach(trainer, packed_tokens=8192), which computes the micro-batches of a step as one row without padding"
CAPTURE = (
    "torch_compile_mode='reduce-overhead', which captures each layer as CUDA graphs, of one size of micro-batches"
)
LARGER = "more sequences a micro-batch"
FEW_LENGTHS = "attach(trainer, few_lengths=True), by which sizes come again"


class GpuAdvice(TrainerCallback):
    """Says once, after ten steps, how busy the GPU is, and which switches would help. `attach` adds it to a Trainer.

    lengths: the shapes of the run's micro-batches, and whether anything is compiled. packed_steps: whether they are
    packed, or why they cannot be.
    """

    def __init__(self, lengths: VaryingLengths, packed_steps: PackedSteps) -> None:
        self.lengths, self.packed_steps = lengths, packed_steps
        self.first_step = 0
        self.samples: list[int] = []

    def on_train_begin(self, args, state, control, **kwargs):
        """Count the steps of this run, which may continue another."""
        self.first_step, self.samples = state.global_step, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        """Sample how busy the GPU is, and say it after the tenth step."""
        step = state.global_step - self.first_step
        if step not in SAMPLED_STEPS or args.device.type != "cuda":
            return
        try:
            self.samples.append(torch.cuda.utilization(args.device))
        except (ModuleNotFoundError, RuntimeError):  # without nvidia-ml-py, or a driver that does not say
            return
        if step == SAMPLED_STEPS[-1] and is_first_rank():
            busy = round(statistics.median(self.samples))
            if busy < BUSY:
                logger.warning(ADVICE.format(busy=busy, switches=self._switches(args, model)))
            else:
                logger.info(f"sonicmoe_hf: the GPU is busy {busy}% of the time")

    def _switches(self, args, model) -> str:
        """Name the options that speed this run up: compiled layers gain nothing where each micro-batch has a length of
        its own."""
        lengths, packed_steps = self.lengths, self.packed_steps
        is_packed, of_batches = packed_steps.has_rows, packed_steps.reason_of_batches
        switches = why_in_python(model) if lengths.is_compiled else []
        is_possible = args.gradient_accumulation_steps > 1 and packed_steps.reason is None and of_batches is None
        can_pack = is_possible and not is_packed
        varies = len(lengths.shapes) > 1 and not (is_packed or can_pack)
        if can_pack:
            switches.append(PACK)
        if varies and not lengths.few_lengths and of_batches in (None, PADDED_FIRST):  # others keep their lengths
            switches.append(FEW_LENGTHS)
        if not lengths.is_compiled and not varies:
            switches.append(COMPILE)
        has_one_size = len(lengths.shapes) == 1 and not is_packed
        if lengths.is_compiled and has_one_size and args.world_size == 1 and can_capture(model):
            switches.append(CAPTURE)
        return "; ".join([*switches, LARGER])
