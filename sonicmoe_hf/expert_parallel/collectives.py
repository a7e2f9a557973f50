"""Collectives over a process group that autograd differentiates, and sums of rows by token.

Letters: N ranks of the group, T tokens, H hidden size, P routed pairs, R rows.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
import torch.distributed as dist

from ..kernels.interface import Rows
from ..layer import backends

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older versions' name
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _LinearMap(torch.autograd.Function):
    """A linear map `apply_map(tensor, *saved)`, whose gradient is `transpose(gradient, *saved)`."""

    @staticmethod
    def forward(ctx, tensor, apply_map, transpose, *saved):
        ctx.transpose = transpose
        ctx.save_for_backward(*saved)
        return apply_map(tensor, *saved)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.transpose(gradient, *ctx.saved_tensors), *(None,) * (len(ctx.needs_input_grad) - 1)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _sum(tensor, group):
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _mean(tensor, count, group):
    mean = tensor / count
    if group is not None:
        dist.all_reduce(mean, group=group)
    return mean


def _gather(tensor, group, works=None):
    tensor = tensor.contiguous()
    gathered = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
    work = _all_gather(gathered, tensor, group=group, async_op=True)
    if works is None:
        work.wait()
    else:
        works.append(work)
    return gathered


def _scatter_sum(summand, group):
    out = summand.new_empty(len(summand) // dist.get_world_size(group), *summand.shape[1:])
    _reduce_scatter(out, summand.contiguous(), group=group)
    return out


def _exchange(tensor, send_sizes, receive_sizes, group):
    received = tensor.new_empty(sum(receive_sizes), *tensor.shape[1:])
    dist.all_to_all_single(received, tensor.contiguous(), receive_sizes, send_sizes, group=group)
    return received


def _take_rows(num_rows, x_TH, *rows):
    return x_TH[Rows(*rows).token[:num_rows].long()]


def _sum_rows(num_tokens, y_RH, *rows):
    kernels = backends.load(backends.choose(y_RH.device, y_RH.dtype).name)
    return kernels.combine(y_RH.contiguous(), None, Rows(*rows), num_tokens)


def sum_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensor as it is, and sum its gradient over the ranks, each of which has a part of it."""
    return _LinearMap.apply(tensor, _identity, partial(_sum, group=group))


def mean_of_gradients(tensor: torch.Tensor, count: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the tensor as it is; divide its gradient by `count` and sum it over the ranks of `group`, if there is
    one."""
    return _LinearMap.apply(tensor, _identity, partial(_mean, count=count, group=group))


def sum_over_ranks(summand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks, which all go on with the same; the gradient is every rank's own."""
    return _LinearMap.apply(summand, partial(_sum, group=group), _identity)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, works: list) -> torch.Tensor:
    """Gather the ranks' tensors of one size: [N * size, ...], one after the other. Read it after `wait()` of what is put
    into `works`. Its gradient is summed over the ranks."""
    return _LinearMap.apply(tensor, partial(_gather, group=group, works=works), partial(_scatter_sum, group=group))


def scatter_sum(summand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum [N * size, ...] over the ranks, and return this rank's part [size, ...]."""
    return _LinearMap.apply(summand, partial(_scatter_sum, group=group), partial(_gather, group=group))


def exchange(
    tensor: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send the first `send_sizes[0]` rows to the first rank, and so on, and return what the ranks send, in their
    order."""
    forward = partial(_exchange, send_sizes=send_sizes, receive_sizes=receive_sizes, group=group)
    backward = partial(_exchange, send_sizes=receive_sizes, receive_sizes=send_sizes, group=group)
    return _LinearMap.apply(tensor, forward, backward)


def rows_of_tokens(x_TH: torch.Tensor, rows: Rows, num_rows: int) -> torch.Tensor:
    """Gather each row's token: x [T, H] -> [R, H]."""
    return _LinearMap.apply(x_TH, partial(_take_rows, num_rows), partial(_sum_rows, len(x_TH)), *rows)


def sum_of_rows(y_RH: torch.Tensor, rows: Rows, num_tokens: int) -> torch.Tensor:
    """Sum each token's rows in fp32, always in the same order: [R, H] -> [T, H]."""
    return _LinearMap.apply(y_RH, partial(_sum_rows, num_tokens), partial(_take_rows, len(y_RH)), *rows)


# by the group itself: another one may have its name once destroy_process_group was called
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_with_same_experts: weakref.WeakKeyDictionary[dist.ProcessGroup, list] = weakref.WeakKeyDictionary()


def ranks_with_same_experts(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Find the ranks that have this one's place in groups like `group`, which all ranks are divided into; None where
    there is one such group. All ranks make the first call together."""
    if group not in _with_same_experts:
        groups: list = [None] * dist.get_world_size()
        dist.all_gather_object(groups, dist.get_process_group_ranks(group))
        own = None
        for ranks in zip(*sorted(set(map(tuple, groups)))):
            subgroup = dist.new_group(ranks) if len(ranks) > 1 else None
            own = subgroup if dist.get_rank() in ranks else own
        _with_same_experts[group] = [own]
    return _with_same_experts[group][0]


def max_over_ranks(values: list[int], group: dist.ProcessGroup) -> list[int]:
    """Take the maximum over the ranks of each value, without waiting for a device."""
    if "cpu:" in dist.get_backend_config(group):
        host_group = group
    else:
        if group not in _host_groups:
            ranks = dist.get_process_group_ranks(group)
            _host_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        host_group = _host_groups[group]
    tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=host_group)
    return tensor.tolist()
