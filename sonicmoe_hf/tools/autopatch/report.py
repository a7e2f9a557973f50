"""The report of `sonicmoe-hf run` on a model, at its first training step."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...layer import backends
from ...layer.packed_weight import PackedWeight
from ...models.patch import PatchReport
from ...patching.support import every_experts, supports
from ...patching.unpacked import dense_beside_bitsandbytes
from ...routing.model import routing_policy
from ...routing.support import with_rounding


def _dtype(weight: torch.Tensor) -> torch.dtype:
    """Name the dtype that experts with this weight are computed in: its own, but for accelerate's mixed precision."""
    state: Any = sys.modules.get("accelerate.state")
    is_mixed = state is not None and state.is_initialized()
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return mixed.get(state.AcceleratorState().mixed_precision, weight.dtype) if is_mixed else weight.dtype


def _training(model: nn.Module) -> str:
    """Say which of the experts' weights are trained."""
    wrappers: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    every: set[Any] = set(every_experts(model))
    ranks = sorted({rank for wrapper in wrappers if wrapper.get_base_layer() in every for rank in wrapper.r.values()})
    weights: list[Any] = [weight for experts in every for weight in experts.parameters()]
    formats = (weight.format for weight in weights if isinstance(weight, PackedWeight))
    packed = next(filter(None, formats), None)  # dense weights on the host have the format ""
    held = "frozen" if packed is None else f"frozen, packed as {packed}"
    dense = dense_beside_bitsandbytes(model)
    if dense is not None:
        held = f"frozen, in {dense} beside bitsandbytes' linear layers (--experts-quantization nf4 packs them)"
    if ranks:
        return f"{held}, with LoRA of rank {' and '.join(map(str, ranks))}"
    return "trained" if any(weight.requires_grad for weight in weights) else held


def describe(model: PreTrainedModel, reason: str | None, trains: bool) -> str:
    """Write lines that say what was patched, what computes it and, once the program `trains`, what is trained; or why
    nothing was patched."""
    name = type(model).__name__
    if reason is not None:
        return f"{name} is not patched: {reason}"
    report = PatchReport(with_rounding(supports(model), model), routing_policy(model))
    weight = next(weight for experts in every_experts(model) for weight in experts.parameters())
    dtype = _dtype(weight)
    choice = backends.choose(weight.device, dtype)
    lines = [f"{name}: {report}", f"  backend: {choice.name} ({choice.reason}), in {dtype}"]
    return "\n".join([*lines, f"  experts: {_training(model)}"] if trains else lines)
