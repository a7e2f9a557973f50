"""Packed weights of which each rank holds some experts: how they are kept from FSDP2, and put together again to be saved.

Under expert parallelism (our own or Transformers') rank i of N has the i-th of N equal shares of every layer's experts.
What it holds is a packed weight of these experts alone, with the values that one rank would give them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedExpertsError
from ..kernels.packed import FORMATS, Format
from ..kernels.packed.nf4 import NF4, NF4_BLOCK, SCALE_SCALES, SCALES_PER_SCALE
from ..layer.holding import Holder, Holding, holding_of, local_tensor
from ..layer.packed_weight import PackedWeight, as_parameter
from ..private import attributes


def pack_share(
    format: str, pack: Callable[..., PackedWeight], shape: torch.Size, device: torch.device, holding: Holding
) -> PackedWeight:
    """Pack the experts of this process, whose weight has this shape, by `pack`. A rank's have the values that they have
    in the whole weight: NF4's scales are stored as differences from the mean of all. All ranks of the group call it.
    Raises an error on every rank where `pack` raises ValueError or RuntimeError on one."""
    if holding.group is None or not FORMATS[format].is_whole:
        return pack()
    values = shape[1:].numel()
    FORMATS[format].check_share(holding.experts, values)

    def mean(absmax: torch.Tensor) -> torch.Tensor:
        gathered = absmax.new_empty(holding.size * absmax.numel())
        dist.all_gather_into_tensor(gathered, absmax.contiguous(), group=holding.group)
        return gathered.mean()

    try:
        packed = pack(mean=mean)
    except (ValueError, RuntimeError):
        scales = (shape[0] * values // NF4_BLOCK,)
        mean(torch.full(scales, torch.nan, dtype=torch.float32, device=device))  # the others wait for it
        raise
    if packed.state is None or not bool(torch.isfinite(packed.state).all()):
        raise ValueError("another rank's experts have NaN or infinite values, or are missing: see that rank's error")
    return packed


def assemble_share(format: Format, tensors: list[torch.Tensor], holding: Holding) -> list[torch.Tensor]:
    """Assemble the tensors that store a rank's experts from those that Transformers read for it, each a stretch of a
    tensor's first dimension. NF4's state belongs to the whole weight, and is gathered from the ranks' stretches. All
    ranks of the group call it."""
    if not isinstance(format, NF4):
        return tensors
    codes, scales, stretch = tensors
    scales_per_expert = scales[0].numel()
    num_scale_scales = -(-holding.num_experts * scales_per_expert // SCALES_PER_SCALE)
    length = SCALE_SCALES.start + num_scale_scales  # of the state
    max_length = -(-length // holding.size)
    stretches = stretch.new_empty(holding.size * max_length)
    padded = torch.nn.functional.pad(stretch, (0, max_length - len(stretch)))
    dist.all_gather_into_tensor(stretches, padded, group=holding.group)
    return [codes, scales, format.state_of(holding.experts, stretches[:length], scales_per_expert)]


def keep_from_fsdp(experts: nn.Module, names: tuple[str, ...], format: str) -> None:
    """Make these weights buffers as soon as ranks share the experts, until `restore_parameters`: a checkpoint is to
    bring them packed. Transformers calls `fully_shard` after it has split experts and before it reads the checkpoint,
    and that would shard and gather parameters that stay where they are. Splitting raises UnsupportedExpertsError where
    a rank's share of a weight cannot be packed apart."""

    def hide(experts: nn.Module) -> None:
        vars(experts)[attributes.PARAMETER_NAMES] = list(experts._parameters)
        held = holding_of(experts).experts
        for name in names:
            weight = experts._parameters[name]
            assert weight is not None
            try:
                FORMATS[format].check_share(held, weight[0].numel())
            except ValueError as error:
                raise UnsupportedExpertsError(f"{type(experts).__name__}.{name}: {error}") from error
            experts._buffers[name] = experts._parameters.pop(name)

    vars(experts)[attributes.WHEN_SPLIT] = hide


def restore_parameters(experts: nn.Module) -> None:
    """Make the weights parameters again once the checkpoint was read, or there is none. Packed weights that
    Transformers put into split ones become this rank's parameters."""
    vars(experts).pop(attributes.WHEN_SPLIT, None)
    weights: dict[str, Any] = experts._parameters
    names = vars(experts).pop(attributes.PARAMETER_NAMES, ())
    for name in names:  # in their order, in which PEFT wraps them
        weights[name] = (weights if name in weights else experts._buffers).pop(name)
    if names and holding_of(experts).by is Holder.EXPERT_PARALLEL:
        for name, weight in weights.items():
            local = local_tensor(weight)
            if isinstance(local, PackedWeight):
                weights[name] = as_parameter(local)


def has_packed_shares(model: nn.Module) -> bool:
    """Tell whether ranks share the packed experts of a model."""
    return any(
        isinstance(weight, PackedWeight) and holding_of(module).by is Holder.EXPERT_PARALLEL
        for module in model.modules()
        for weight in module._parameters.values()
    )


def _gather_on_first(tensor: torch.Tensor, holding: Holding) -> list[torch.Tensor] | None:
    """Gather the ranks' shares of a tensor in host memory on the first rank of the group; None on the others."""
    sent = tensor.contiguous().view(torch.uint8)  # a byte is a byte, whatever dtypes the backend knows
    received = [torch.empty_like(sent) for _ in range(holding.size)] if holding.rank == 0 else None
    dist.gather(sent, received, group=holding.group, group_dst=0)
    return None if received is None else [share.cpu().view(tensor.dtype) for share in received]


def gather_for_saving(
    model: PreTrainedModel, state_dict: dict, distributed_config=None, *, save_on_this_rank: bool = True
) -> dict:
    """Gather whole tensors on the CPU, on the rank that writes; {} on the others. This is
    `gather_sharded_state_dict_for_save` of a model whose ranks share packed experts, and all ranks call it."""
    whole: dict[str, Any] = {}
    shared = {
        f"{prefix}.{tensor_name}": (FORMATS[weight.format], suffix, holding)
        for prefix, module in model.named_modules()
        for name, weight in module._parameters.items()
        if isinstance(weight, PackedWeight) and (holding := holding_of(module)).is_share
        for tensor_name, suffix in zip(FORMATS[weight.format].names(name), FORMATS[weight.format].suffixes)
    }
    for name, tensor in state_dict.items():
        if name in shared:
            format, suffix, holding = shared[name]
            shares = _gather_on_first(tensor, holding)
            tensor = None if shares is None else format.join(suffix, shares)
        elif isinstance(tensor, torch.Tensor):
            tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
            tensor = tensor.cpu().contiguous() if save_on_this_rank else None
        if save_on_this_rank:
            whole[name] = tensor
    return whole
