"""The head's weight of a model with Liger's fused loss, which reads it without calling the head: gathered during the
forward where FSDP2 has the head as a unit of its own, as accelerate makes it of PEFT's models."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def gather_head(model: nn.Module) -> list[Any]:
    """Register hooks by which FSDP2 gathers a frozen head's weight for each forward of its model; return them."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    is_unit = isinstance(head, FSDPModule)
    if not is_unit or head.weight.requires_grad:
        return []
    return [
        model.register_forward_pre_hook(lambda module, args: head.unshard()),
        model.register_forward_hook(lambda module, args, output: head.reshard(), always_call=True),
    ]
