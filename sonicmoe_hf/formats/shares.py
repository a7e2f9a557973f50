"""Packed weights of which each rank holds some experts: read, packed, and put together again to be saved.

Under expert parallelism (our own or Transformers') rank i of N has the i-th of N equal parts of every layer's experts.
What it holds is a packed weight of these experts alone, with the values that one rank would give them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError, UnsupportedExpertsError
from ..kernels.quantized import FORMATS, SCALE_SCALES, SCALES_PER_SCALE, check_part, state_of_part, state_of_parts
from ..layer.experts_module import WHEN_SPLIT, expert_parallelism
from ..layer.packed_weight import PackedWeight
from .state import stored_as

AWAITED = "_sonicmoe_hf_awaited"  # attribute of experts, while a checkpoint is read: the Awaited


class Share(NamedTuple):
    """A rank's part of a layer's experts: the `part`-th of `num_parts` equal ones, which the ranks of `group` hold."""

    group: dist.ProcessGroup
    part: int
    num_parts: int

    def experts(self, num_local: int) -> slice:
        """Which of the layer's experts these are."""
        return slice(self.part * num_local, (self.part + 1) * num_local)


def share_of(experts: nn.Module, name: str) -> Share | None:
    """Of the experts' parameter `name`; None where this rank holds all experts."""
    parallelism = expert_parallelism(experts)
    if parallelism is not None:
        return Share(parallelism.ranks.group, parallelism.ranks.rank, parallelism.ranks.size)
    mesh = getattr(
        experts._parameters[name], "device_mesh", None
    )  # a DTensor's: Transformers itself splits the experts
    return None if mesh is None else Share(mesh.get_group(), mesh.get_local_rank(), mesh.size())


class Awaited:
    """An experts module's weights that a checkpoint is to bring packed, for this rank's experts.

    FSDP2 must not see them: Transformers calls `fully_shard` between the splitting of experts and the reading of the
    checkpoint, and that would shard and gather what stays where it is. So they are away until a state dict is asked for.
    There they stand as the sharded tensors by which Transformers reads this rank's part of a checkpoint.
    """

    def __init__(self, experts: nn.Module, names: tuple[str, ...]):
        self.placeholders: dict[str, Any] = {name: experts._parameters.pop(name) for name in names}
        self.handles = [
            experts.register_state_dict_pre_hook(functools.partial(self._reveal)),
            experts.register_state_dict_post_hook(functools.partial(self._show_placeholders)),
        ]

    def _reveal(self, experts, prefix, keep_vars):
        for name, placeholder in self.placeholders.items():
            if name not in experts._parameters:
                experts._parameters[name] = nn.Parameter(placeholder.to_local().detach(), requires_grad=False)

    def _show_placeholders(self, experts, state_dict, prefix, local_metadata):
        for name, placeholder in self.placeholders.items():
            if experts._parameters[name].is_meta:
                state_dict[prefix + name] = placeholder

    def end(self, experts: nn.Module) -> None:
        """The checkpoint was read, or there is none: the weights are here to stay."""
        self._reveal(experts, "", False)
        for handle in self.handles:
            handle.remove()


def await_packed(experts: nn.Module, names: tuple[str, ...], format: str) -> None:
    """Note that a checkpoint is to bring these weights packed. Where ranks share the experts, they become `Awaited`, or
    UnsupportedExpertsError says that a rank's part has no state of its own."""

    def when_split(experts):
        for name in names:
            weight, share = experts._parameters[name], share_of(experts, name)
            assert share is not None  # now that ranks share them
            try:
                check_part(format, share.experts(len(weight) // share.num_parts), weight[0].numel())
            except ValueError as error:
                raise UnsupportedExpertsError(f"{type(experts).__name__}.{name}: {error}") from error
        vars(experts)[AWAITED] = Awaited(experts, names)

    vars(experts)[WHEN_SPLIT] = when_split


def end_awaiting(experts: nn.Module) -> None:
    """The checkpoint was read, or there is none."""
    vars(experts).pop(WHEN_SPLIT, None)
    awaited = vars(experts).pop(AWAITED, None)
    if awaited is not None:
        awaited.end(experts)


def quantize_share(weight: torch.Tensor, format: str, is_transposed: bool, order: str, share: Share) -> PackedWeight:
    """A rank's experts packed as they would be in the whole weight. All ranks of the share's group call it.

    Raises:
        ValueError: as PackedWeight.quantize, on every rank; or NF4's scales have scales of their own across ranks.
    """
    pack = functools.partial(PackedWeight.quantize, weight, format, is_transposed, order)
    return pack_share(pack, format, weight.shape, weight.device, share)


def pack_share(
    pack: Callable[..., PackedWeight], format: str, shape: torch.Size, device: torch.device, share: Share
) -> PackedWeight:
    """What `pack(mean=...)` makes of a rank's experts, whose weight has this shape, with the mean of the whole weight.
    All ranks of the share's group call it.

    Raises:
        ValueError: what `pack` raises, on every rank; or NF4's scales have scales of their own across ranks.
    """
    values = shape[1:].numel()
    check_part(format, share.experts(shape[0]), values)
    if format != "nf4":
        return pack()

    def mean(absmax: torch.Tensor) -> torch.Tensor:
        of_all = absmax.new_empty(share.num_parts * absmax.numel())
        dist.all_gather_into_tensor(of_all, absmax.contiguous(), group=share.group)
        return of_all.mean()

    try:
        packed = pack(mean=mean)
    except ValueError:
        mean(torch.full((shape[0] * values // FORMATS[format],), torch.nan, device=device))  # the others wait
        raise
    assert packed.state is not None  # NF4 has one
    if not bool(torch.isfinite(packed.state).all()):
        raise ValueError("another rank's experts have NaN or infinite values, or are missing: see that rank's error")
    return packed


def stored_share(name: str, tensors: dict[str, torch.Tensor], format: str, share: Share) -> dict[str, torch.Tensor]:
    """What stores a rank's experts of the parameter `name`, of what Transformers read for them: every stored tensor cut
    along its first dimension. NF4's state belongs to the whole weight, and is gathered."""
    if format != "nf4":
        return tensors
    codes, scales, piece = (tensors[stored] for stored in stored_as(name, format))
    num_local, scales_per_expert = len(scales), scales[0].numel()
    length = SCALE_SCALES.start - (-share.num_parts * num_local * scales_per_expert // SCALES_PER_SCALE)
    longest = -(-length // share.num_parts)
    pieces = piece.new_empty(share.num_parts * longest)
    padded = torch.nn.functional.pad(piece, (0, longest - len(piece)))
    dist.all_gather_into_tensor(pieces, padded, group=share.group)
    state = state_of_part(pieces[:length], share.experts(num_local), scales_per_expert)
    return dict(zip(stored_as(name, format), (codes, scales, state)))


def gathered_rows(piece: torch.Tensor, rows: int, parameter: Any) -> tuple[torch.Tensor, int]:
    """Of what a checkpoint stores for a sharded parameter, with `rows` rows in all: (all rows, from the ranks' pieces;
    which of the parameter's own rows is this rank's first). All ranks call it.

    Raises:
        CheckpointError: the parameter is sharded otherwise than by its rows over one group of ranks.
    """
    mesh, sharded = parameter.device_mesh, []
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and mesh.size(dim) > 1:
            sharded.append((dim, placement))
    if not sharded:
        return piece, 0
    if len(sharded) > 1 or not sharded[0][1].is_shard(0):
        raise CheckpointError(
            f"a linear layer is sharded as {parameter.placements}, which the checkpoint's blocks do not take; shard by "
            "fsdp_size alone"
        )
    dim = sharded[0][0]
    count, rank = mesh.size(dim), mesh.get_local_rank(dim)
    most = -(-rows // count)
    sent = piece.contiguous().view(torch.uint8)
    sent = torch.nn.functional.pad(sent, (0, 0, 0, most - len(sent)))
    received = sent.new_empty(count * most, sent.shape[1])
    dist.all_gather_into_tensor(received, sent, group=mesh.get_group(dim))
    return received[:rows].view(piece.dtype), rank * -(-parameter.shape[0] // count)


def is_split(model: nn.Module) -> bool:
    """Whether ranks share the packed experts of a model."""
    return any(
        isinstance(weight, PackedWeight) and expert_parallelism(module) is not None
        for module in model.modules()
        for weight in module._parameters.values()
    )


def _gathered(part: torch.Tensor, share: Share) -> list[torch.Tensor] | None:
    """The ranks' parts, in the memory of the host, on the first rank of the group; None on the others."""
    sent = part.contiguous().view(torch.uint8)  # a byte is a byte, whatever dtypes the backend knows
    received = [torch.empty_like(sent) for _ in range(share.num_parts)] if share.part == 0 else None
    dist.gather(sent, received, group=share.group, dst=dist.get_global_rank(share.group, 0))
    return None if received is None else [one.cpu().view(part.dtype) for one in received]


def gathered_for_saving(
    model: PreTrainedModel, state_dict: dict, distributed_config=None, *, save_on_this_rank: bool = True
) -> dict:
    """`gather_sharded_state_dict_for_save` of a model whose ranks share packed experts: whole tensors on the CPU, on the
    rank that writes; {} on the others. All ranks call it."""
    whole = {}
    shared = {
        f"{prefix}.{stored}": share
        for prefix, module in model.named_modules()
        for name, weight in module._parameters.items()
        if isinstance(weight, PackedWeight) and (share := share_of(module, name)) is not None
        for stored in stored_as(name, weight.format)
    }
    for name, tensor in state_dict.items():
        if name in shared:
            parts = _gathered(tensor, shared[name])
            join = state_of_parts if name.endswith("_state") else torch.cat  # NF4's alone
            tensor = None if parts is None else join(parts)
        elif isinstance(tensor, torch.Tensor):
            tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
            tensor = tensor.cpu().contiguous() if save_on_this_rank else None
        if save_on_this_rank:
            whole[name] = tensor
    return whole
