"""Small training steps, in which a GPU waits for Python: what a Trainer says of them, attention for lengths that vary,
and larger chunks of Liger's fused loss.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from ..kernels.announce import is_first_rank
from ..patching.forwards import has_liger_forward
from ..private.torch import has_compiled_parts, mark_as_any_size
from .gathered_head import gather_head
from .layers import compile_once, expect_lengths, why_in_python

logger = logging.get_logger(__name__)

OBSERVED = 8  # micro-batches, in which a choice is made
FEW_TOKENS = 8192  # of a micro-batch; attention of more takes the GPU longer than planning takes the host
SAMPLED_STEPS = range(6, 11)  # of a run: the first ones compile
BUSY = 60  # percent
LOGITS_BYTES = 2**29  # of a chunk of the fused loss
ADVICE = "sonicmoe_hf: the GPU is busy {busy}% of the time, and waits for Python in the rest. What helps: {switches}"
COMPILE = (
    "torch_compile=True in the Trainer's arguments, attach(trainer, compile=True) or `sonicmoe-hf run --compile`, which "
    "compile each layer"
)
PACK = "attach(trainer, packed_tokens=8192), which computes the micro-batches of a step as one row without padding"
LARGER = "more sequences a micro-batch"
FEW_LENGTHS = "attach(trainer, few_lengths=True), by which sizes come again"


class SmallSteps(TrainerCallback):
    """Says once how busy the GPU is, and chooses what suits the sizes of a run. `attach` adds it to a Trainer.

    cuDNN's attention, which torch prefers on Hopper, plans for some 80 ms whenever a length is new. Where most of the
    first micro-batches have new lengths and few tokens, it is off until the run ends. Compiled code keeps the attention
    that it was compiled with, so there it is off from the second length on, for which torch compiles for any.

    Liger's fused linear cross entropy cuts the tokens into chunks whose logits take no more memory than its input. Of
    2,048 tokens and 152 thousand words that is 32 tokens a chunk: it reads the head's weight 64 times, a third of the
    GPU's time. During the run a chunk's logits take about half a GiB.

    Where the micro-batches of the first step have several lengths, layers are compiled for any at once.
    """

    def __init__(self) -> None:
        self.compile: bool | None = None  # what `attach` was given
        self.few_lengths = False
        self.compile_options: dict[str, Any] | None = None
        self._begin(0)

    def _begin(self, step: int) -> None:
        self.first_step = step
        self.shapes: set[tuple[int, ...]] = set()
        self.count = self.tokens = 0
        self.samples: list[int] = []
        self.flops_per_token: float | None = None
        self.is_compiled = self.is_packed = self.has_disabled_cudnn = self.has_lengths = False
        self.hooks: list[Any] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Compile layers where that is asked for, observe this run, and let Liger's loss have larger chunks."""
        self.end()  # of an attempt with a larger batch (auto_find_batch_size)
        self._begin(state.global_step)
        if model is not None and self.compile_options is not None:
            compile_once(model, self.compile_options, by_argument=self.compile is None)
        modules = [] if model is None else list(model.modules())
        models = [each for each in modules if has_liger_forward(each)]
        self.hooks = [
            module.register_forward_pre_hook(hook, with_kwargs=True)
            for each in models
            for module, hook in ((each, _enlarge_chunks), (each.base_model, _keep_from_layers))
        ]
        self.is_compiled = getattr(args, "torch_compile", False) or has_compiled_parts(modules)
        self.hooks += [hook for each in models for hook in gather_head(each)]

    def expect(self, model, batches: list, masks: list[torch.Tensor]) -> None:
        """Let compiled layers take any length from their first call on, where micro-batches are packed, or a step's have
        several lengths.

        masks: [1, N], of the rows in which the micro-batches are packed.
        """
        self.is_packed = self.is_packed or bool(masks)
        if self.is_compiled and not self.has_lengths:
            columns = [batch.get("input_ids") if hasattr(batch, "get") else None for batch in batches]
            lengths = {ids.shape[-1] for ids in columns if isinstance(ids, torch.Tensor)}
            self.has_lengths = bool(masks) or len(lengths) > 1
            if self.has_lengths:
                expect_lengths(model)
        if self.has_lengths:
            for mask in masks:  # which compiled layers read beside their arguments
                mark_as_any_size(mask, 1)

    def note(self, inputs) -> None:
        """Observe the sizes of a training micro-batch."""
        ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
        if self.count >= OBSERVED or not isinstance(ids, torch.Tensor):
            return
        self.count += 1
        self.tokens += ids.numel()
        self.shapes.add(tuple(ids.shape))
        if self.has_lengths:
            for column in inputs.values():  # a mask is also read in compiled layers
                if isinstance(column, torch.Tensor) and column.shape == ids.shape and ids.shape[-1] > 1:
                    mark_as_any_size(column, column.dim() - 1)
        varies = len(self.shapes) > (1 if self.is_compiled else OBSERVED // 2)
        are_short = self.tokens <= self.count * FEW_TOKENS
        if varies and are_short and torch.backends.cuda.cudnn_sdp_enabled():
            torch.backends.cuda.enable_cudnn_sdp(False)
            self.has_disabled_cudnn = True

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
        """Name what gives this run speed: compiled layers gain nothing where each micro-batch has a length of its own."""
        switches = why_in_python(model) if self.is_compiled else []
        can_pack = args.gradient_accumulation_steps > 1 and not self.is_packed
        varies = len(self.shapes) > 1 and not (self.is_packed or can_pack)
        if can_pack:
            switches.append(PACK)
        if varies and not self.few_lengths:
            switches.append(FEW_LENGTHS)
        if not self.is_compiled and not varies:
            switches.append(COMPILE)
        return "; ".join([*switches, LARGER])

    def end(self) -> None:
        """Put torch's settings back as they were, when `trainer.train` ends, also by an error."""
        if self.has_disabled_cudnn:
            torch.backends.cuda.enable_cudnn_sdp(True)
        self.has_disabled_cudnn = False
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def chunk_mem_const(num_tokens: int, hidden_size: int) -> int:
    """Compute the size of Liger's chunks in its own measure: a chunk's logits as a multiple of its loss's input."""
    return max(1, LOGITS_BYTES // max(2 * num_tokens * hidden_size, 1))


def _enlarge_chunks(model: Any, args, kwargs):
    """Give a Liger model's forward the size of its loss's chunks."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not model.training or ids is None or "chunk_mem_const" in kwargs:
        return None
    size = chunk_mem_const(ids.numel(), model.config.get_text_config().hidden_size)
    return args, {**kwargs, "chunk_mem_const": size}


def _keep_from_layers(model: Any, args, kwargs):
    """Take the size of chunks, which is the loss's alone, out of what layers get: compiled ones would be compiled again
    for another size."""
    return args, {name: value for name, value in kwargs.items() if name != "chunk_mem_const"}
