"""What `sonicmoe-hf run` says of a model at its first training step."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layer import backends
from ..layer.packed_weight import PackedWeight
from ..patching.patch import PatchReport, patch_state
from ..patching.support import every_experts, supports


class ComputedBy(NamedTuple):
    """Where and in which dtype experts are computed."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def from_call(cls, hidden_states: torch.Tensor) -> ComputedBy:
        """Of a call of the experts with this input."""
        return cls(hidden_states.device, _under_autocast(hidden_states.device, hidden_states.dtype))

    @classmethod
    def from_model(cls, model: nn.Module) -> ComputedBy:
        """Of a model whose calls were not seen, as compiled ones: by its weights and accelerate's mixed precision."""
        weight = next(weight for experts in every_experts(model) for weight in experts.parameters())
        state = sys.modules.get("accelerate.state")
        if state is not None and state.is_initialized():
            dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
            return cls(weight.device, dtypes.get(state.AcceleratorState().mixed_precision, weight.dtype))
        return cls(weight.device, weight.dtype)


def _under_autocast(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def is_packed(model: nn.Module) -> str | None:
    """The format that a model's experts are packed in, or None."""
    weights = (weight for experts in every_experts(model) for weight in experts.parameters(recurse=False))
    return next((weight.format for weight in weights if isinstance(weight, PackedWeight)), None)


def _training(model: nn.Module) -> str:
    """What of the experts is trained."""
    wrappers: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    every: set[Any] = set(every_experts(model))
    ranks = sorted({rank for wrapper in wrappers if wrapper.get_base_layer() in every for rank in wrapper.r.values()})
    packed = is_packed(model)
    held = "frozen" if packed is None else f"frozen, packed as {packed}"
    if ranks:
        return f"{held}, with LoRA of rank {' and '.join(map(str, ranks))}"
    is_trained = any(weight.requires_grad for experts in every for weight in experts.parameters())
    return "trained" if is_trained else held


def describe(model: PreTrainedModel, reason: str | None, computed_by: ComputedBy | None, trains: bool = True) -> str:
    """Lines that say what was patched, what computes it and, once the program `trains`, what is trained; or why nothing
    was patched."""
    name = type(model).__name__
    if reason is not None:
        return f"{name} is not patched: {reason}"
    report = PatchReport(supports(model), patch_state(model).policy)
    device, dtype = computed_by or ComputedBy.from_model(model)
    choice = backends.choose(device, dtype)
    lines = [f"{name}: {report}", f"  backend: {choice.name} ({choice.reason}), in {dtype}"]
    return "\n".join([*lines, f"  experts: {_training(model)}"] if trains else lines)
