"""attach: the callbacks and wrapped methods that a Trainer gets of us."""

from __future__ import annotations

from functools import partial

from torch import nn
from transformers import Trainer

from ..patching.moe_layers import is_patched
from ..private.transformers import LOADING_METHODS, forget_dequantization
from .compiled import CompiledLayers
from .documents import checked_step
from .expanded_memory import add_expanded_memory
from .few_lengths import with_few_lengths
from .flops import FlopsPerToken, count_flops
from .gpu_advice import GpuAdvice
from .lengths import VaryingLengths
from .liger_loss import LigerLoss
from .load_callback import ExpertLoadCallback
from .load_reports import send_histograms
from .loss_filter import LossFilter, filtered_loss
from .loss_scale import loss_with_scale
from .methods import WhileTraining, find_callback, wrap_method
from .module_walks import ModuleWalks
from .packed_steps import PackedSteps, packed_step
from .rank_states import save_rank_states
from .report import FirstStepReport
from .resume import load_whole
from .rounding_callback import TokenRoundingCallback
from .sampling import check_sampling
from .step_callback import StepCallback
from .steps import clear_step


def _log_with_load(trainer, log, logs, *args, **kwargs):
    """Call `trainer.log` with the experts' load added to training logs."""
    callback = find_callback(trainer, ExpertLoadCallback)
    if "loss" in logs and callback is not None:
        metrics = callback.collect(trainer.model, trainer.state.global_step)
        if metrics and callback.histograms:
            send_histograms(trainer, callback.history[-1])
        logs = {**logs, **metrics}
    return log(logs, *args, **kwargs)


def _train_to_the_end(trainer, train, *args, **kwargs):
    """Call `trainer.train`, after which the routers are as before, also where an error or Ctrl-C ended it inside a
    step."""
    try:
        return train(*args, **kwargs)
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, WhileTraining):
                callback.end()
        if is_patched(trainer.model):
            clear_step(trainer.model)


def _training_step(trainer, training_step, *args, **kwargs):
    """Call `trainer.training_step` with rows in place of micro-batches, and no documents that ranks would mix, and filter
    its loss."""
    step = partial(packed_step, trainer, partial(checked_step, trainer, training_step))
    return filtered_loss(trainer, step, *args, **kwargs)


def _compute_loss(trainer, compute_loss, model, inputs, *args, **kwargs):
    """Call `trainer.compute_loss` with inputs of few lengths where that is asked for, and with the scale of balancing."""
    if model.training and (lengths := find_callback(trainer, VaryingLengths)) is not None:
        packed_steps = find_callback(trainer, PackedSteps)
        if lengths.few_lengths and not (packed_steps is not None and packed_steps.has_rows):
            inputs = with_few_lengths(trainer, inputs)
        lengths.note(inputs)
    return loss_with_scale(trainer, compute_loss, model, inputs, *args, **kwargs)


def _get_batch_samples(trainer, get_batch_samples, *args, **kwargs):
    """Call `trainer.get_batch_samples`, arrange its micro-batches in rows, and prepare for their lengths."""
    batches, num_items = get_batch_samples(*args, **kwargs)
    if (packed_steps := find_callback(trainer, PackedSteps)) is not None:
        packed_steps.arrange(trainer, batches, num_items)
    if (lengths := find_callback(trainer, VaryingLengths)) is not None:
        rows = [] if packed_steps is None else packed_steps.rows.values()
        lengths.expect(trainer.model, batches, [row.token_mask for row in rows])
    return batches, num_items


def _check_arguments(compile: object, packed_tokens: object, few_lengths: object) -> None:
    """Check the arguments of `attach`.

    Raises:
        TypeError: one would count as True or as a number without being one.
        ValueError: packed_tokens is negative.
    """
    for name, value, default in (
        ("compile", compile, "torch_compile of the arguments"),
        ("few_lengths", few_lengths, "no"),
    ):
        if value is not None and not isinstance(value, bool):
            raise TypeError(
                f"attach: {name} is {value!r}, where True, False or None (the default: {default}) is expected"
            )
    if packed_tokens is not None and (packed_tokens is True or not isinstance(packed_tokens, int)):
        raise TypeError(
            f"attach: packed_tokens is {packed_tokens!r}, where a number of tokens is expected, such as 8192, or False"
        )
    if packed_tokens is not None and packed_tokens < 0:
        raise ValueError(
            f"packed_tokens is {packed_tokens!r}; give the largest number of tokens of a row, such as 8192, or False to "
            "compute micro-batches one by one"
        )


def attach(
    trainer,
    compile: bool | None = None,
    packed_tokens: int | None = None,
    few_lengths: bool | None = None,
    expanded_memory: str | int | None = None,
) -> ExpertLoadCallback:
    """Log the experts' load in a Trainer, restore its checkpoints whole and scale balancing. Call it before training,
    when the Trainer has its callbacks.

    The metrics of its ExpertLoadCallback (added if there is none) go through `trainer.log`. On resume and with
    load_best_model_at_end, checkpoints with the hub's names pass through the model's own conversion, which the Trainer
    leaves out, so that fused experts are restored too. Adapters of a model that Transformers loaded sharded
    (`DistributedConfig`) are resumed with their optimiser, which each rank writes beside the checkpoint. Callbacks
    end with `trainer.train`, after an error or Ctrl-C too. `trainer.compute_loss` gives
    LoadBalancing(per_layer_loss=...) its scale where the loss is computed outside the model, as by TRL's trainers. A step
    of packed documents raises ValueError where ranks share sequences by attention without masks (`cp_size`, `sp_size`).

    The first step prints what is in force: layers, routing, backend, dtype, and which experts' weights are trained. On a
    GPU, the tenth step says how busy it is (where nvidia-ml-py is installed), and what would help. Where most of the
    first micro-batches have few tokens and new lengths, cuDNN's attention, which plans 80 ms for each new length, is off
    until training ends. Liger's fused loss has larger chunks meanwhile: half a GiB of logits. The model's train() and
    parameters(), which a Trainer calls at each step, are loops in place of recursions, and `logging_nan_inf_filter`
    filters losses on the GPU, where the Trainer waits for each.

    Args:
        compile: whether layers are compiled as by `compile_layers`, when training begins. By default where the arguments
            have `torch_compile=True`, with their backend and mode; the Trainer then compiles no model as a whole. False
            leaves `torch_compile` to the Trainer.
        packed_tokens: compute an accumulated step without padding, in rows of at most so many tokens, with the loss and
            the gradients of its micro-batches; dropout draws other numbers. It is for Transformers' own loss, on one GPU
            or by DDP. By default, where layers are compiled, by `compile_layers` before training too, rows have at most
            as many tokens as the largest micro-batch so far has with padding, and 4,096, so that memory does not grow.
            Micro-batches are computed one by one, and the reason is said, where a row would not be as they are, where
            attention is not "sdpa", flash attention or "torch_sinks", and where CUDA graphs are captured. False, or 0,
            leaves rows out.
        few_lengths: whether training micro-batches are padded at the end to a few lengths, by less than a tenth or 8
            tokens. Where lengths vary, sizes come again, and with them what was prepared for them; losses and gradients
            stay the same. Batches with more than input_ids, labels and attention_mask [B, L] stay as they are. By default
            rows of packed_tokens are padded so, up to 4,096 tokens of one, and other micro-batches are not.
        expanded_memory: the memory of the GPU ("20GiB", or a number of bytes) in which packed experts lie expanded too
            while the Trainer trains, of as many layers as fit: their products expand nothing, and results stay the same.
    Returns:
        The callback, whose `history` keeps the experts' load.
    Raises:
        ValueError: a TokenRoundingCallback in a trainer of reinforcement learning or preference optimization; a trainer
            of TRL's that would send vLLM experts with adapters, or packed ones; expanded_memory. In the first step:
            packed_tokens where a row's loss, ranks or sequences are not apart. TypeError: `trainer` is no Trainer, or an
            argument of another type.
            UnsupportedExpertsError: expanded_memory, and no layer's experts are packed on this device.
    Example:
        sonicmoe_hf.attach(trainer, packed_tokens=8192)  # gradient_accumulation_steps=4, short texts
    """
    if not hasattr(trainer, "callback_handler"):
        raise TypeError(
            f"attach takes a Trainer and got a {type(trainer).__name__}: attach(trainer) before trainer.train(); a model "
            "in a loop of your own needs patch_model(model) alone"
        )
    _check_arguments(compile, packed_tokens, few_lengths)
    check_sampling(trainer)
    callbacks = trainer.callback_handler.callbacks
    for callback in callbacks:
        if isinstance(callback, TokenRoundingCallback):
            callback.check_trainer(trainer, trainer.args)
    if isinstance(trainer.model, nn.Module):
        forget_dequantization(trainer.model)
    save_rank_states(trainer)
    callback = find_callback(trainer, ExpertLoadCallback)
    if callback is None:
        callback = ExpertLoadCallback()
        trainer.add_callback(callback)
    compiled, lengths, packed_steps = _find_or_add_callbacks(trainer)
    if expanded_memory is not None:
        add_expanded_memory(trainer, expanded_memory)
    lengths.few_lengths = lengths.few_lengths if few_lengths is None else few_lengths
    compiled.choose(trainer, compile)
    packed_steps.choose(packed_tokens, compiled.options is not None, few_lengths)
    for ours in callbacks:
        if isinstance(ours, StepCallback):
            ours.attached = True
    _wrap_methods(trainer)
    return callback


def _find_or_add_callbacks(trainer) -> tuple[CompiledLayers, VaryingLengths, PackedSteps]:
    """Find the callbacks that `attach` gives settings, or add them; and add those that take none and are not there."""
    compiled = find_callback(trainer, CompiledLayers) or CompiledLayers()
    lengths = find_callback(trainer, VaryingLengths) or VaryingLengths()
    packed_steps = find_callback(trainer, PackedSteps) or PackedSteps()
    # what is compiled is compiled before others ask for it
    first = compiled, lengths, packed_steps, find_callback(trainer, LossFilter) or LossFilter()
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [*first, *(each for each in callbacks if each not in first)]
    for each in (LigerLoss(), ModuleWalks(), FlopsPerToken(), GpuAdvice(lengths, packed_steps), FirstStepReport()):
        if (present := find_callback(trainer, type(each))) is None:
            trainer.add_callback(each)
        elif isinstance(present, GpuAdvice):
            present.lengths, present.packed_steps = lengths, packed_steps
    return compiled, lengths, packed_steps


def _wrap_methods(trainer) -> None:
    """Wrap the methods of the Trainer in the functions above."""
    for name in LOADING_METHODS:
        wrap_method(trainer, name, load_whole)
    wrap_method(trainer, "log", _log_with_load)
    wrap_method(trainer, "train", _train_to_the_end)
    wrap_method(trainer, "training_step", _training_step)
    wrap_method(trainer, "get_batch_samples", _get_batch_samples)
    wrap_method(trainer, "compute_loss", _compute_loss)
    if type(trainer).floating_point_ops is Trainer.floating_point_ops:
        wrap_method(trainer, "floating_point_ops", count_flops)
