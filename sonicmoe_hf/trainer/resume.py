"""Trainer checkpoints loaded through the model's own conversion, so that fused experts are restored too.

Checkpoints hold the hub's names, one tensor per expert in most families. `from_pretrained` converts them. Transformers'
Trainer does not: on resume and with load_best_model_at_end it calls `load_state_dict`, which leaves fused experts as they
are in memory and warns. PEFT, FSDP and DeepSpeed save and load by the module's names, and lose nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import get_checkpoint_shard_files

from ..formats.stored_as_declared import check_undeclared
from ..layer.holding import is_partitioned, mesh_of
from ..patching.moe_layers import find_layers
from ..private.transformers import load_converted, warn_after_load, weight_conversions


class Restored(NamedTuple):
    """Names that a checkpoint lacked and that the model lacked; the Trainer warns about both."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def whole_model(model: nn.Module | None) -> PreTrainedModel | None:
    """Find the model that Trainer checkpoints hold whole under the hub's names; None with PEFT, FSDP, ZeRO-3 and the
    like."""
    model = getattr(model, "_orig_mod", model)  # torch.compile
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config"):
        return None
    if any(mesh_of(p) is not None or is_partitioned(p) or p.is_meta for p in model.parameters()):
        return None  # DTensors, ZeRO-3, offloaded
    return model


def conversions(model: PreTrainedModel) -> list:
    """List how Transformers converts this model's checkpoints, besides renaming what is obsolete; [] where names
    agree."""
    return weight_conversions(model) or get_model_conversion_mapping(model, add_legacy=False)


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the parameters of every layer's experts, by their names in the model."""
    experts = {layer.experts for layer in find_layers(model)}
    return {
        f"{name}.{own}": parameter
        for name, module in model.named_modules()
        if module in experts
        for own, parameter in module.named_parameters(recurse=False)
    }


def checkpoint_files(folder: Path) -> list[str]:
    """List the weight files of a checkpoint, in the Trainer's order of preference; [] where there are none."""
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if (folder / name).is_file():
            return [str(folder / name)]
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        if (folder / name).is_file():
            return get_checkpoint_shard_files(folder, folder / name)[0]
    return []


@torch.no_grad()
def restore(model: PreTrainedModel, folder) -> Restored | None:
    """Load a checkpoint's weights into `model` through the conversion that `from_pretrained` uses, in place.

    Parameters keep their identity, device, dtype and requires_grad, so that optimisers, tied weights and DDP stay right.

    Returns:
        What was missing on either side; None where there is nothing to convert, or no weight file in `folder`.
    Raises:
        RuntimeError: an expert weight is missing or does not fit; the model is unchanged.
        CheckpointError: the files hold codes, or plain weights under packed names, and the model is not quantized.
    """
    files = checkpoint_files(Path(folder))
    if getattr(model, "hf_quantizer", None) is None:
        check_undeclared(Path(file) for file in files if file.endswith(".safetensors"))
    if not files or not conversions(model):
        return None
    slots: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    loaded = []
    try:
        info = load_converted(model, files, conversions(model))
        loaded = [(tensor, tensors[name]) for tensors, name, tensor in slots if tensors[name] is not tensor]
    finally:
        for tensors, name, tensor in slots:
            tensors[name] = tensor
    loaded_ids = {id(tensor) for tensor, _ in loaded}
    state = model.state_dict(keep_vars=True)
    # tied weights have two names
    missing = sorted(name for name in info.missing_keys if id(state[name]) not in loaded_ids)
    unread = {*info.conversion_errors, *(name for name, *_ in info.mismatched_keys)}
    misfits = sorted(unread | (set(missing) & set(expert_weights(model))))
    if misfits:
        raise RuntimeError(
            f"{folder} does not hold the experts of this {type(model).__name__}: {len(misfits)} weights are missing or "
            f"of another shape (first: {misfits[0]}); resume with the model that wrote the checkpoint"
        )
    for tensor, value in loaded:
        tensor.copy_(value)
    return Restored(missing, sorted(info.unexpected_keys))


def check_experts_restored(wrapped: nn.Module, args: TrainingArguments, state: TrainerState, attached: bool) -> None:
    """Raise RuntimeError where a Trainer that is not attached would go on, or end, without a checkpoint's experts."""
    model = whole_model(wrapped)
    loads = state.global_step > 0 or args.load_best_model_at_end
    if not attached and loads and model is not None and conversions(model) and expert_weights(model):
        moment = f"resumes at step {state.global_step}" if state.global_step else "ends with load_best_model_at_end"
        raise RuntimeError(
            f"training {moment}, but Transformers' Trainer restores weights by name and leaves fused experts as they are "
            "in memory: call sonicmoe_hf.attach(trainer), when it has its callbacks, before trainer.train()"
        )


def load_whole(trainer, load, resume_from_checkpoint=None, model=None) -> None:
    """Load a checkpoint on resume or with load_best_model_at_end by conversion, where there is something to convert; else
    by `load`, the Trainer's method."""
    own_format = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    whole = None if own_format else whole_model(trainer.model if model is None else model)
    folder = resume_from_checkpoint or trainer.state.best_model_checkpoint
    restored = None if whole is None else restore(whole, folder)
    if restored is None:
        load(*(argument for argument in (resume_from_checkpoint, model) if argument is not None))
    else:
        warn_after_load(trainer, restored)
