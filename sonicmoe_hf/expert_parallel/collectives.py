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
from ..layer.products import Arriving

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


@torch.no_grad()  # gloo writes into views, which autograd would watch
def _begin_gather(tensor, group) -> Arriving:
    tensor = tensor.contiguous()
    gathered = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
    return Arriving(gathered, _all_gather(gathered, tensor, group=group, async_op=True))


def _begin_scatter_sum(summand, group) -> Arriving:
    out = summand.new_empty(len(summand) // dist.get_world_size(group), *summand.shape[1:])
    return Arriving(out, _reduce_scatter(out, summand.contiguous(), group=group, async_op=True))


def _gather(tensor, group):
    return _begin_gather(tensor, group).wait()


def _scatter_sum(summand, group):
    return _begin_scatter_sum(summand, group).wait()


def _all_to_all(tensor, send_sizes, receive_sizes, group):
    received = tensor.new_empty(sum(receive_sizes), *tensor.shape[1:])
    dist.all_to_all_single(received, tensor.contiguous(), receive_sizes, send_sizes, group=group)
    return received


def _take_rows(num_rows, x_TH, *rows):
    return x_TH[Rows(*rows).token[:num_rows].long()]


def _sum_rows(num_tokens, y_RH, *rows):
    kernels = backends.load(backends.choose(y_RH.device, y_RH.dtype).name)
    return kernels.combine(y_RH.contiguous(), None, Rows(*rows), num_tokens)


def sum_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Pass the tensor on as it is, and sum its gradient over the ranks, each of which has a summand of it."""
    return _LinearMap.apply(tensor, _identity, partial(_sum, group=group))


def mean_of_gradients(tensor: torch.Tensor, count: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Pass the tensor on as it is; divide its gradient by `count` and sum it over the ranks of `group`, if there is
    one."""
    return _LinearMap.apply(tensor, _identity, partial(_mean, count=count, group=group))


def sum_over_ranks(summand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks, which all go on with the same; the gradient is every rank's own."""
    return _LinearMap.apply(summand, partial(_sum, group=group), _identity)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the ranks' tensors of one size: [N * size, ...], one after the other. Its gradient is summed over the
    ranks."""
    return _LinearMap.apply(tensor, partial(_gather, group=group), partial(_scatter_sum, group=group))


class Gathering:
    """The Exchange that gives each rank the tokens of all of them, whose number is the same on each. The first x is on
    its way from the beginning."""

    def __init__(self, x_TH: torch.Tensor, group: dist.ProcessGroup, is_long: bool):
        self.group, self.is_long = group, is_long
        self.num_tokens = dist.get_world_size(group) * len(x_TH)
        self._first: tuple[torch.Tensor, Arriving] | None = (x_TH, _begin_gather(x_TH, group))

    def gather(self, tensor: torch.Tensor) -> Arriving:
        """Gather the tensors [T, H] of all ranks: [num_tokens, H]."""
        first, self._first = self._first, None
        if first is not None:
            x_TH, arriving = first
            if (x_TH.data_ptr(), x_TH.dtype) == (tensor.data_ptr(), tensor.dtype):  # else a module cast it meanwhile
                return arriving
            arriving.wait()
        return _begin_gather(tensor, self.group)

    def scatter_sum(self, tensor: torch.Tensor) -> Arriving:
        """Sum [num_tokens, H] over the ranks: the tokens [T, H] of this rank."""
        return _begin_scatter_sum(tensor, self.group)


def all_to_all(
    tensor: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send the first `send_sizes[0]` rows to the first rank, the next `send_sizes[1]` to the second, and so on; return
    the rows that the ranks send, in the order of ranks."""
    forward = partial(_all_to_all, send_sizes=send_sizes, receive_sizes=receive_sizes, group=group)
    backward = partial(_all_to_all, send_sizes=receive_sizes, receive_sizes=send_sizes, group=group)
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
    """Find the ranks that have this one's number in groups like `group`, into which all ranks are divided; None where
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
