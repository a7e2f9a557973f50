"""A stand-in on a CPU for aten._flash_attention_forward and _backward, which torch has for CUDA alone: their layouts,
their alignment of windows, what they refuse, and what they leave in memory for tokens outside of all sequences."""

import contextlib
import math

import torch

from sonicmoe_hf.attention import flash


def _check(q, k, v, cum_q, cum_k, max_q, max_k, *others):
    dims = 4 if cum_q is None else 3
    for x in (q, k, v, *others):
        assert x.dim() == dims and x.stride(-1) == 1 and x.dtype == q.dtype
        assert x.shape[-1] == q.shape[-1] and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
    assert q.shape[-2] % k.shape[-2] == 0 and k.shape == v.shape
    assert (cum_q is None) == (cum_k is None)
    if cum_q is not None:
        for cum, longest, x in ((cum_q, max_q, q), (cum_k, max_k, k)):
            assert cum.dtype == torch.int32 and cum.is_contiguous() and cum.device == x.device and cum.dim() == 1
            assert cum.diff().max() <= longest and cum[0] == 0 and cum[-1] <= x.shape[0] and cum.diff().min() >= 0
        assert cum_q.shape == cum_k.shape
        assert max_q > 1, "the kernel takes it that every sequence has one query"


def _sequences(q, k, cum_q, cum_k):
    """List the spans of each sequence's queries and keys: indices of tensors [B, T, H, D], or slices of [N, H, D]."""
    if cum_q is None:
        return [(index, index) for index in range(q.shape[0])]
    return [(slice(cum_q[i], cum_q[i + 1]), slice(cum_k[i], cum_k[i + 1])) for i in range(cum_q.shape[0] - 1)]


def _scores(q, k, is_causal, scale, left, right):
    """Compute [H, T, S] of one sequence's q [T, H, D] and k [S, H / G, D]."""
    left, right = (None if x is None or x < 0 else x for x in (left, right))
    right = 0 if is_causal else right
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    distance = torch.arange(q.shape[0])[:, None] + (k.shape[0] - q.shape[0]) - torch.arange(k.shape[0])
    sees = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        sees &= distance <= left
    if right is not None:
        sees &= distance >= -right
    return (torch.einsum("thd,shd->hts", q, k) * scale).masked_fill(~sees, -torch.inf)


@torch.autocast("cpu", enabled=False)
def forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert dropout_p == 0 and not return_debug_mask and seqused_k is None and alibi_slopes is None
    out = torch.full_like(query, math.nan)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = query.shape[:-1].numel() // query.shape[-2]
    lse = torch.full((query.shape[-2], shape), math.nan, dtype=dtype)
    if cum_seq_q is None:
        lse = lse.view(query.shape[2], query.shape[0], query.shape[1]).transpose(0, 1).contiguous()
    for span_q, span_k in _sequences(query, key, cum_seq_q, cum_seq_k):
        q, k, v = query[span_q].to(dtype), key[span_k].to(dtype), value[span_k].to(dtype)
        scores = _scores(q, k, is_causal, scale, window_size_left, window_size_right)
        own_lse = scores.logsumexp(-1)
        p = torch.exp(scores - own_lse.masked_fill(own_lse == -torch.inf, 0)[..., None])
        result = torch.einsum("hts,shd->thd", p, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
        out[span_q] = result.to(out.dtype)
        lse[span_q if cum_seq_q is None else (slice(None), span_q)] = own_lse.masked_fill(
            own_lse == -torch.inf, torch.inf
        )
    unused = torch.empty(0)
    return out, lse, torch.empty(2, dtype=torch.uint64), unused, unused


@torch.autocast("cpu", enabled=False)
def backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    rng_state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, out, grad_out)
    assert logsumexp.dtype in (torch.float32, torch.float64) and logsumexp.is_contiguous() and dropout_p == 0
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (query, key, value))
    dtype, groups = logsumexp.dtype, query.shape[-2] // key.shape[-2]
    for span_q, span_k in _sequences(query, key, cum_seq_q, cum_seq_k):
        q, k, v, o, do = (
            x.to(dtype) for x in (query[span_q], key[span_k], value[span_k], out[span_q], grad_out[span_q])
        )
        own_lse = logsumexp[span_q if cum_seq_q is None else (slice(None), span_q)]
        p = torch.exp(_scores(q, k, is_causal, scale, window_size_left, window_size_right) - own_lse[..., None])
        delta = (do * o).sum(-1).T[..., None]
        dp = torch.einsum("thd,shd->hts", do, v.repeat_interleave(groups, dim=1))
        ds = p * (dp - delta) * scale
        dq[span_q] = torch.einsum("hts,shd->thd", ds, k.repeat_interleave(groups, dim=1)).to(dq.dtype)
        for gradient, full in ((dk, torch.einsum("hts,thd->shd", ds, q)), (dv, torch.einsum("hts,thd->shd", p, do))):
            gradient[span_k] = full.unflatten(1, (-1, groups)).sum(2).to(gradient.dtype)
    return dq, dk, dv


@contextlib.contextmanager
def as_on_cuda(monkeypatch):
    """Run the code inside as on CUDA, on a CPU, with these kernels."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    with monkeypatch.context() as patch:
        patch.setattr(flash, "uses_cuda_kernels", lambda device: True)
        yield
    library._destroy()
