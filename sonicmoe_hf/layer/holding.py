"""Holding: who holds a layer's experts, and which of them this rank has.

Letters: E experts of the layer.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..private import attributes
from .experts_module import IMPLEMENTATION, is_experts, num_experts_in


class ExpertParallelism(Protocol):
    """The object that brings experts the tokens of other ranks: expert_parallel.implementation.

    batch_group: the ranks that have the same batch, or None. ep_mesh: the ranks of `holding` as a DeviceMesh.
    """

    holding: Holding
    batch_group: dist.ProcessGroup | None
    ep_mesh: Any

    def with_summed_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of a tensor that ranks with the same batch share."""

    def with_mean_gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        """Average the gradient of a tensor of this rank's experts."""

    def take_values_of_first_rank(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor's values from the first of the ranks with the same experts."""


class Holder(enum.Enum):
    """The division of a layer's experts among ranks; each value is the name that errors give it."""

    ONE_DEVICE = "one device"
    EXPERT_PARALLEL = "expert parallelism of sonicmoe_hf"
    THEIR_EXPERT_PARALLEL = "expert parallelism of Transformers' own"
    TENSOR_PARALLEL = "tensor parallelism"
    FSDP2 = "FSDP2"
    ZERO3 = "DeepSpeed's ZeRO-3"


class Holding(NamedTuple):
    """Holding of a layer's experts by ranks, expert e by rank e // num_local of the group.

    by: what divides them. num_local: experts with which this rank computes, by whole weights except under tensor
    parallelism. group: the ranks that have different experts; None where each has all, or where the weights do not tell
    the ranks. rank, size: this rank's number in the group, and the group's size; 0 and 1 without a group.
    """

    by: Holder
    num_local: int
    group: Any = None  # a ProcessGroup; those who exchange tokens know that there is one
    rank: int = 0
    size: int = 1

    @property
    def is_share(self) -> bool:
        """Tell whether this rank has only some of the layer's experts."""
        return self.by in (Holder.EXPERT_PARALLEL, Holder.THEIR_EXPERT_PARALLEL)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.size * self.num_local

    @property
    def experts(self) -> slice:
        """The layer's experts that are here."""
        return slice(self.rank * self.num_local, (self.rank + 1) * self.num_local)


def has_share(experts: Any, num_experts: int | None) -> bool:
    """Tell whether expert parallelism gives this module a share of the layer's `num_experts`, if they are known: its
    own `num_experts` counts the local ones."""
    is_marked = bool(vars(experts).get("_is_expert_parallel"))
    return is_marked or (num_experts is not None and experts.num_experts < num_experts)


def mesh_of(tensor: Any) -> Any:
    """Find the DeviceMesh of the ranks that share a tensor as a DTensor; None of a tensor that is this rank's alone."""
    return getattr(tensor, "device_mesh", None)


def is_partitioned(parameter: Any) -> bool:
    """Tell whether DeepSpeed's ZeRO-3 has cut a parameter, which is empty then until it is gathered."""
    return hasattr(parameter, "ds_id")


def local_tensor(tensor: Any) -> Any:
    """Get this rank's shard or share of a tensor that ranks have as a DTensor; of others the tensor itself."""
    return tensor if mesh_of(tensor) is None else tensor.to_local()


def local_shape(tensor: Any) -> torch.Size:
    """Read the shape of `local_tensor`."""
    return local_tensor(tensor).shape


def holding_of(experts: Any) -> Holding:
    """Find who holds the experts of a module, and which are here; of a module without experts, such as PEFT wraps too,
    who holds its parameters."""
    if (ours := expert_parallelism(experts)) is not None:
        return ours.holding
    weights = [weight for weight in experts._parameters.values() if weight is not None]
    num_local = getattr(experts, "num_experts", 0)
    mesh = next((mesh for mesh in map(mesh_of, weights) if mesh is not None), None)
    config = getattr(experts, "config", None)  # which experts outside the interface lack until they are patched
    if has_share(experts, num_experts_in(config) if is_experts(experts) else None):
        if mesh is None or mesh.ndim > 1:  # FSDP2 shards them too
            return Holding(Holder.THEIR_EXPERT_PARALLEL, num_local)
        group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        return Holding(Holder.THEIR_EXPERT_PARALLEL, num_local, group, rank, size)
    if any(map(is_partitioned, weights)):
        return Holding(Holder.ZERO3, num_local)
    placements = (placement for weight in weights for placement in getattr(weight, "placements", ()))
    cut_dims = [placement.dim for placement in placements if not placement.is_replicate()]
    if not cut_dims:
        return Holding(Holder.ONE_DEVICE, num_local)
    # tensor parallelism cuts each expert, and gets the cut weights to the class's forward by one of its own; FSDP2 cuts
    # between experts, or where somebody told it to, and hands whole ones to any forward
    is_tensor_parallel = any(cut_dims) and "forward" in vars(experts)
    return Holding(Holder.TENSOR_PARALLEL if is_tensor_parallel else Holder.FSDP2, num_local)


def expert_parallelism(experts: nn.Module) -> ExpertParallelism | None:
    """Find our implementation of expert parallelism, where it brings these experts their tokens."""
    return vars(experts).get(attributes.PARALLELISM)


def has_expert_parallelism() -> bool:
    """Tell whether this version of Transformers takes our implementation of expert parallelism (see
    expert_parallel)."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: F401
    except ImportError:  # 5.22 has the module without it
        return False
    return True


def expert_parallel_remedy() -> str:
    """Say how to get our implementation of expert parallelism."""
    if has_expert_parallelism():
        return f'load the model with DistributedConfig(ep_implementation="{IMPLEMENTATION}")'
    import transformers

    return (
        f"ours needs Transformers' EPImplementationInterface, which came with 5.23; {transformers.__version__} is "
        "installed"
    )
