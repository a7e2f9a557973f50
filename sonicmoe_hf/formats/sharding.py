"""FSDP2 (fully_shard) over packed weights: each rank keeps the codes and scales of its shard of the experts.

fully_shard splits a parameter by its first dimension, here the experts, and gathers codes and scales where a layer runs:
a quarter of the bytes that bf16 experts would take on the wire. NF4's state is small and kept by every rank, while other
formats' goes along with the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.packed import FORMATS, Quantized
from ..layer.packed_weight import PackedWeight, alias
from ..private.torch import collectives

aten = torch.ops.aten
all_gather, wait_tensor = collectives.all_gather_into_tensor.default, collectives.wait_tensor.default
UNEVEN = (
    "{experts} experts cannot be cut into shards of {size}: FSDP over packed experts needs a number of ranks that "
    "divides them; use such a number, or replicate the weights (fully_shard's ignored_params)"
)
RESHARDED = (
    "packed experts cannot be sharded again over fewer ranks after forward: give fully_shard reshard_after_forward=True "
    "or False, not a number"
)
NOT_SAVED = (
    "{operation}: these experts are packed as {format} and sharded by FSDP2, which distributed checkpoints (DCP) do not "
    "take. They never change: save the adapters alone, by save_pretrained or with get_model_state_dict(model, "
    "options=StateDictOptions(ignore_frozen_params=True)), and load the experts from their own checkpoint"
)


class PackedShard(PackedWeight):
    """The experts of a packed weight that one rank of FSDP2 holds, inside its DTensor; nothing computes with them.

    state: of these experts, or NF4's, of the whole weight.
    """

    unsupported = NOT_SAVED

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Raise RuntimeError: one rank has a shard of the weight alone."""
        raise RuntimeError("this is one rank's shard of a packed weight sharded by FSDP; unshard the module first")

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Split the weight for FSDP2: the tensors to gather, and the rest, which stays as it is."""
        return _by_expert(self), (self.state, self.format, self.is_transposed)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Make the whole weight over the gathered tensors, which later all-gathers fill again."""
        if out is not None:
            return None
        state, format, is_transposed = metadata
        whole = _with_state(all_gather_outputs, state)
        return PackedWeight(whole, format, param_dtype, is_transposed), ()


def _by_expert(weight: PackedWeight) -> tuple[torch.Tensor, ...]:
    """List the tensors with a row for each expert: all but the state that ties experts together."""
    has_states = weight.state is not None and not FORMATS[weight.format].is_whole
    return weight.packed if has_states else weight.packed[:2]  # type: ignore[return-value]


def _make_like(kind: type[PackedWeight], weight: PackedWeight, tensors: Sequence[torch.Tensor]) -> Any:
    """Make a weight or a shard like `weight` of other experts' tensors."""
    return kind(_with_state(tensors, weight.state), weight.format, weight.dtype, weight.is_transposed)


def _with_state(tensors: Sequence[torch.Tensor], state: torch.Tensor | None) -> Quantized:
    """Make a weight's tensors of those with a row for each expert, and of the state where it is none of these."""
    codes, scales, *states = tensors
    return Quantized(codes, scales, states[0] if states else state)


def _shard(weight: PackedWeight, tensors: Sequence[torch.Tensor]) -> PackedShard:
    return _make_like(PackedShard, weight, tensors)


def _split(weight, size, dim=0):
    if dim != 0 or type(weight) is not PackedWeight:
        return NotImplemented
    if weight.shape[0] % size:
        raise RuntimeError(UNEVEN.format(experts=weight.shape[0], size=size))
    # fully_shard splits a weight once for each number of ranks that it will be sharded over, all before any forward
    if vars(weight).setdefault("shard_size", size) != size:
        raise RuntimeError(RESHARDED)
    return [_shard(weight, tensors) for tensors in zip(*(tensor.split(size) for tensor in _by_expert(weight)))]


def _new_zeros(weight, size, *, dtype=None, layout=None, device=None, pin_memory=None):
    if tuple(size[1:]) != tuple(weight.shape[1:]):
        return NotImplemented
    return _shard(weight, [tensor.new_zeros(size[0], *tensor.shape[1:]) for tensor in _by_expert(weight)])


def _slice(weight, dim=0, start=None, end=None, step=1):
    if dim != 0 or step != 1 or not isinstance(weight, PackedShard):
        return NotImplemented
    return _shard(weight, [tensor[start:end] for tensor in _by_expert(weight)])


def _view(weight, size):
    """Stay as it is: fully_shard keeps a flat view of a shard, and asks nothing of it."""
    is_flat = isinstance(weight, PackedShard) and list(size) in ([-1], [weight.numel()])
    if not is_flat and tuple(size) != tuple(weight.shape):
        return NotImplemented
    return alias(weight)


def _as_strided(weight, size, stride, storage_offset=None):
    if tuple(size) != tuple(weight.shape) or tuple(stride) != weight.stride() or storage_offset:
        return NotImplemented
    return alias(weight)


def _gather(weight, group_size, group_name):
    """Gather a sharded weight for DTensor.full_tensor()."""
    if not isinstance(weight, PackedShard):
        return NotImplemented
    tensors = [wait_tensor(all_gather(tensor, group_size, group_name)) for tensor in _by_expert(weight)]
    return _make_like(PackedWeight, weight, tensors)


# by torch's op: what FSDP2 does with a packed weight; registration.py puts them into PackedWeight.operations
OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.new_zeros.default: _new_zeros,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten.as_strided.default: _as_strided,
    all_gather: _gather,
    wait_tensor: alias,
}
WRAP = "_c10d_functional::_wrap_tensor_autograd"  # from torch 2.13 on, for collectives under autograd
if (wrap := getattr(collectives, WRAP.rpartition(":")[2], None)) is not None:
    OPERATIONS[wrap.default] = alias
