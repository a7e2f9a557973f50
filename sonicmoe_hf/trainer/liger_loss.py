"""Liger's fused loss, which reads the head's weight without calling the head: it reads it less often, and whole."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..patching.forwards import has_liger_forward
from .methods import WhileTraining

LOGITS_BYTES = 2**29  # of a chunk of the fused loss


class LigerLoss(WhileTraining):
    """Sets in Liger's fused loss larger chunks, and passes it the head's weight where FSDP2 has it sharded. `attach` adds
    it to a Trainer.

    Liger's fused linear cross entropy cuts the tokens into chunks whose logits take no more memory than its input. Of
    2,048 tokens and 152 thousand words that is 32 tokens a chunk: it reads the head's weight 64 times, a third of the
    GPU's time. During the run a chunk's logits take about half a GiB.
    """

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def begin(self, args: Any, model: Any) -> None:
        """Register hooks on models whose forward is Liger's."""
        for each in [] if model is None else filter(has_liger_forward, model.modules()):
            self.hooks += [
                each.register_forward_pre_hook(_enlarge_chunks, with_kwargs=True),
                each.base_model.register_forward_pre_hook(_keep_from_layers, with_kwargs=True),
                *gather_head(each),
            ]

    def end(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def chunk_mem_const(num_tokens: int, hidden_size: int) -> int:
    """Compute the size of Liger's chunks in its own measure: a chunk's logits as a multiple of its loss's input."""
    return max(1, LOGITS_BYTES // max(2 * num_tokens * hidden_size, 1))


def _enlarge_chunks(model: Any, args, kwargs):
    """Set in a Liger model's forward the size of its loss's chunks."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not model.training or ids is None or "chunk_mem_const" in kwargs:
        return None
    size = chunk_mem_const(ids.numel(), model.config.get_text_config().hidden_size)
    return args, {**kwargs, "chunk_mem_const": size}


def _keep_from_layers(model: Any, args, kwargs):
    """Take the size of chunks, which is the loss's alone, out of what layers get: compiled ones would be compiled again
    for another size."""
    return args, {name: value for name, value in kwargs.items() if name != "chunk_mem_const"}


def gather_head(model: nn.Module) -> list[Any]:
    """Register hooks by which FSDP2 gathers a frozen head's weight for each forward of its model, where it has the head
    as a unit of its own, as accelerate makes it of PEFT's models. Return them."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    is_unit = isinstance(head, FSDPModule)
    if not is_unit or head.weight.requires_grad:
        return []
    return [
        model.register_forward_pre_hook(lambda module, args: head.unshard()),
        model.register_forward_hook(lambda module, args, output: head.reshard(), always_call=True),
    ]
