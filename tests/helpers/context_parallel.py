"""torch's context parallelism on CPUs, of which it computes no attention: here each rank's queries see the keys of all
ranks, gathered. Sequences are sliced, and functions replaced, as torch does it."""

import contextlib
from unittest import mock

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention

_SDPA = torch.nn.functional.scaled_dot_product_attention


def positions_of_rank(rank, world, length):
    """List the positions of a sequence that a rank is given: a part near its begin and one as near to its end."""
    parts = torch.arange(length).chunk(2 * world)
    return torch.cat([parts[rank], parts[2 * world - 1 - rank]])


class _Gathered(torch.autograd.Function):
    """The parts [B, H, T, D] of all ranks, one after the other; backward sums the gradients that ranks have of a part."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


def _attention_over(mesh):
    group, world = mesh.get_group(), mesh.size()

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert is_causal and attn_mask is None, "accelerate's hooks take the masks away"
        key, value = (_Gathered.apply(each, group) for each in (key, value))
        of_rank = [positions_of_rank(rank, world, key.shape[2]) for rank in range(world)]
        sees = of_rank[mesh.get_local_rank()][:, None] >= torch.cat(of_rank)
        return _SDPA(query, key, value, sees, dropout_p, scale=scale, enable_gqa=enable_gqa)

    return attention


@contextlib.contextmanager
def on_cpus():
    """Have `torch.distributed.tensor.experimental.context_parallel` work on CPUs."""

    def enable(seq_dim, mesh):
        torch.nn.functional.scaled_dot_product_attention = _attention_over(mesh)

    def disable():
        torch.nn.functional.scaled_dot_product_attention = _SDPA

    with (
        mock.patch.object(_attention, "_enable_context_parallel_dispatcher_impl", enable),
        mock.patch.object(_attention, "_disable_context_parallel_dispatcher_impl", disable),
    ):
        yield
