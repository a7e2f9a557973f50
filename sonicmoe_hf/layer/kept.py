"""Packed weights that a layer expands while gradient checkpointing computes it again, kept for the backward that
follows: a step expands each weight twice, not three times.

    forward              expand | products | free
    the same, again      expand | products | keep:  saved[0] --> its storage --> {"gate_up": ..., "down": ...}
    backward                                 take them from that storage | products | free

Kept weights are an attribute of the storage of the first tensor that is saved for backward. torch keeps one Python object
for a storage as long as its memory lives, so backward finds them through whichever tensor views that memory. Where no
backward comes (after an error, or in a checkpoint inside another), they are freed together with the saved tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ..private.attributes import KEPT
from ..private.torch import current_graph_task_id, is_traced_in_checkpoint
from . import backends
from .call import LayerCall
from .pieces import MAX_ROWS

Weights = dict[str, torch.Tensor]  # [E, out, in], by "gate_up" and "down"
# Memory that must stay free beside the expanded weights, in multiples of the bytes of h and y, for the rest of a layer's
# backward: the experts' own tensors take 2.5 of the 6 if they are all there at once; attention, gradients and
# fragmentation have the others.
FREE_ROWS = 6
_had_room: dict[torch.device, bool] = {}  # by the last look: while a CUDA graph is captured, nothing can be asked


def may_keep() -> bool:
    """Tell whether memory that forward allocates is still there in backward. Memory of torch.compile's CUDA graphs is so
    only in a graph of backward, which computes the layer again."""
    config = sys.modules.get("torch._inductor.config")
    return config is None or not config.triton.cudagraphs or is_traced_in_checkpoint()


def expand(call: LayerCall, dtype: torch.dtype, names: Sequence[str]) -> Weights:
    """Expand those of a layer's weights that are packed, where they serve several products and there is room: in what
    backward computes again, until it has used them, and for a layer in pieces."""
    if call.options.fp8 or not (call.options.piece or _is_backward()):
        return {}
    return expand_if_room(call, dtype, names)


def expand_if_room(call: LayerCall, dtype: torch.dtype, names: Sequence[str]) -> Weights:
    """Expand those of a layer's weights that are packed and that the kernels do not read so, where there is room."""
    options, rows = call.options, call.rows
    kernels = backends.load(options.backend)
    packed = {name: projection for name in names if (projection := call.projection(name)).format}
    packed = {
        name: each
        for name, each in packed.items()
        if not kernels.reads_packed(each.format, dtype, rows, True)
        and not kernels.decodes(each.operand(), dtype, rows, True)
    }
    shapes = [each.logical_shape() for each in packed.values()]
    num_rows = min(rows.token.numel(), MAX_ROWS)
    elements = sum(size_out * (num * size_in + FREE_ROWS * num_rows) for num, size_out, size_in in shapes)
    if not packed or not _has_room(call.weight.device, dtype.itemsize * elements):
        return {}
    if options.piece:  # whose offsets are each piece's
        every = torch.arange(shapes[0][0] + 1, dtype=rows.offsets.dtype, device=rows.offsets.device)
        rows = rows._replace(offsets=every)
    return {name: each.dequantize(kernels, dtype, rows) for name, each in packed.items()}


def _is_backward() -> bool:
    return current_graph_task_id() >= 0


def _has_room(device: torch.device, nbytes: int) -> bool:
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _had_room[device] = free_on_card(device) >= nbytes
    return _had_room.get(device, False)


def free_on_card(device: torch.device) -> int:
    """Count the bytes of a GPU that tensors can still take; a CPU has room."""
    if device.type != "cuda":
        return sys.maxsize
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    cached = stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
    return torch.cuda.mem_get_info(device)[0] + cached


def keep(weights: Weights, saved: Sequence[torch.Tensor]) -> None:
    """Keep the weights for as long as the first of the tensors that are saved for backward, if that follows at once."""
    if weights and saved and _is_backward():
        vars(saved[0].untyped_storage())[KEPT] = weights


def take_kept(saved: Sequence[torch.Tensor]) -> Weights:
    """Take the weights that were kept with what was saved."""
    return vars(saved[0].untyped_storage()).pop(KEPT, {}) if saved else {}


def use(weights: Weights, call: LayerCall) -> LayerCall:
    """Put the weights, which are taken out of `weights`, into the places of the packed ones."""
    while weights:
        name, weight = weights.popitem()
        dense = weight.transpose(1, 2) if call.options.transposed else weight
        expanded = call.projection(name)._replace(weight=dense, scales=None, state=None, format="")
        call = call._replace(gate_up=expanded) if name == "gate_up" else call._replace(down=expanded)
    return call
