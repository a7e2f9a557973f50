"""Collectives over a process group that autograd differentiates, and sums of rows by token.

Letters: N ranks of the group, T tokens, H hidden size, P routed pairs, R rows.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from ..kernels.interface import Rows
from ..layer import backends

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older versions' name
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _MeanOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, count, group):
        ctx.count, ctx.group = count, group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        mean = gradient / ctx.count
        if ctx.group is not None:
            dist.all_reduce(mean, group=ctx.group)
        return mean, None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group, works):
        ctx.group = group
        gathered, work = _gather(tensor, group)
        works.append(work)
        return gathered

    @staticmethod
    def backward(ctx, gradient):
        return _scatter_sum(gradient, ctx.group), None, None


class _ScatteredSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return _scatter_sum(partial, group)

    @staticmethod
    def backward(ctx, gradient):
        gathered, work = _gather(gradient, ctx.group)
        work.wait()
        return gathered, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, send_sizes, receive_sizes, group):
        ctx.sizes, ctx.group = (send_sizes, receive_sizes), group
        return _exchange(tensor, send_sizes, receive_sizes, group)

    @staticmethod
    def backward(ctx, gradient):
        send_sizes, receive_sizes = ctx.sizes
        return _exchange(gradient, receive_sizes, send_sizes, ctx.group), None, None, None


class _RowsOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH, num_rows, *rows):
        ctx.num_tokens = len(x_TH)
        ctx.save_for_backward(*rows)
        return x_TH[Rows(*rows).token[:num_rows].long()]

    @staticmethod
    def backward(ctx, gradient_RH):
        return _sum_rows(gradient_RH, Rows(*ctx.saved_tensors), ctx.num_tokens), None, *(None,) * len(Rows._fields)


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RH, num_tokens, *rows):
        ctx.num_rows = len(y_RH)
        ctx.save_for_backward(*rows)
        return _sum_rows(y_RH, Rows(*rows), num_tokens)

    @staticmethod
    def backward(ctx, gradient_TH):
        token_R = Rows(*ctx.saved_tensors).token[: ctx.num_rows].long()
        return gradient_TH[token_R], None, *(None,) * len(Rows._fields)


def _gather(tensor, group):
    tensor = tensor.contiguous()
    gathered = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
    return gathered, _all_gather(gathered, tensor, group=group, async_op=True)


def _scatter_sum(partial, group):
    out = partial.new_empty(len(partial) // dist.get_world_size(group), *partial.shape[1:])
    _reduce_scatter(out, partial.contiguous(), group=group)
    return out


def _exchange(tensor, send_sizes, receive_sizes, group):
    received = tensor.new_empty(sum(receive_sizes), *tensor.shape[1:])
    dist.all_to_all_single(received, tensor.contiguous(), receive_sizes, send_sizes, group=group)
    return received


def _sum_rows(y_RH, rows, num_tokens):
    kernels = backends.load(backends.choose(y_RH.device, y_RH.dtype).name)
    return kernels.combine(y_RH.contiguous(), None, rows, num_tokens)


def sum_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor as it is; its gradient is summed over the ranks, each of which has a part of it."""
    return _SumOfGradients.apply(tensor, group)


def mean_of_gradients(tensor: torch.Tensor, count: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The tensor as it is; its gradient is divided by `count` and summed over the ranks of `group`, if there is one."""
    return _MeanOfGradients.apply(tensor, count, group)


def sum_over_ranks(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, which all go on with the same: its gradient is every rank's own."""
    return _SumOverRanks.apply(partial, group)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, works: list) -> torch.Tensor:
    """[N * size, ...]: the ranks' tensors of one size, one after the other. Read it after `wait()` of what is put into
    `works`. Its gradient is summed over the ranks."""
    return _Gathered.apply(tensor, group, works)


def scatter_sum(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part [size, ...] of the sum over the ranks of [N * size, ...]."""
    return _ScatteredSum.apply(partial, group)


def exchange(
    tensor: torch.Tensor, send_sizes: list[int], receive_sizes: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """The first `send_sizes[0]` rows go to the first rank, and so on; what comes back in turn."""
    return _Exchanged.apply(tensor, send_sizes, receive_sizes, group)


def rows_of_tokens(x_TH: torch.Tensor, rows: Rows, num_rows: int) -> torch.Tensor:
    """[R, H]: of each row its token's x."""
    return _RowsOfTokens.apply(x_TH, num_rows, *rows)


def sum_of_rows(y_RH: torch.Tensor, rows: Rows, num_tokens: int) -> torch.Tensor:
    """[T, H]: each token's rows, summed in fp32 and always in the same order."""
    return _SumOfRows.apply(y_RH, num_tokens, *rows)


# by the group itself: another one may have its name once destroy_process_group was called
_of_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


_with_the_same_part: weakref.WeakKeyDictionary[dist.ProcessGroup, list] = weakref.WeakKeyDictionary()


def with_the_same_part(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The ranks that have this one's place in groups like `group`, which all ranks are divided into; None where there is
    one such group. All ranks make the first call together."""
    if group not in _with_the_same_part:
        groups: list = [None] * dist.get_world_size()
        dist.all_gather_object(groups, dist.get_process_group_ranks(group))
        own = None
        for ranks in zip(*sorted(set(map(tuple, groups)))):
            made = dist.new_group(ranks) if len(ranks) > 1 else None
            own = made if dist.get_rank() in ranks else own
        _with_the_same_part[group] = [own]
    return _with_the_same_part[group][0]


def largest(values: list[int], group: dist.ProcessGroup) -> list[int]:
    """The maximum over the ranks of each value, without waiting for a device."""
    if "cpu:" in dist.get_backend_config(group):
        of_hosts = group
    else:
        if group not in _of_hosts:
            ranks = dist.get_process_group_ranks(group)
            _of_hosts[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        of_hosts = _of_hosts[group]
    tensor = torch.tensor(values)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=of_hosts)
    return tensor.tolist()
