"""torch's flash attention, forward and backward, behind one interface for CPU and CUDA.

There are no sinks here. Forward returns the result o and the log-sum-exp l of every query's scores; backward takes an o
and an l that need not be those, which is how sinks.py adds the sink.

Letters: B sequences, T queries, S keys, H heads, G query heads to each key head, D size of a head, N tokens of packed
sequences. q [B, T, H, D], k and v [B, S, H / G, D], l [B, H, T]; packed q [N, H, D], k and v [N, H / G, D], l [H, N].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..private.torch import (
    cpu_flash_backward,
    cpu_flash_forward,
    flash_backward,
    flash_forward,
)

MAX_HEAD = 256  # of the CUDA kernels
NO_WINDOW = -1


class Bounds(NamedTuple):
    """The starts and ends of packed sequences (int32 [sequences + 1]), and bounds of their lengths."""

    queries: torch.Tensor
    keys: torch.Tensor
    max_q: int
    max_k: int


class Visible(NamedTuple):
    """The keys that a query sees: those of its sequence, up to its own position where `causal` (the last query has the
    last key's position), at most `window` - 1 positions away unless that is NO_WINDOW. On a CPU `mask` says it all: it
    is added to the scores and broadcasts to [B, H, T, S]."""

    causal: bool
    window: int
    bounds: Bounds | None = None
    mask: torch.Tensor | None = None


def uses_cuda_kernels(device: torch.device) -> bool:
    """Tell whether the kernels for CUDA compute there, rather than the one for CPUs."""
    return device.type == "cuda"


def forward(q, k, v, visible: Visible, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute o, with q's shape, and l: fp32, or fp64 for fp64. A query without keys has o = 0 and any l but a finite
    one that is large: -inf or +inf, or on a CPU 0."""
    size = v.shape[-1]
    q, k, v = (_pad_heads(x, _kernel_head(q, v)) for x in (q, k, v))
    run = _cuda_forward if uses_cuda_kernels(q.device) else _cpu_forward
    o, l = run(q, k, v, visible, scale)
    return o[..., :size], l


def backward(do, q, k, v, o, l, visible: Visible, scale: float) -> list[torch.Tensor]:
    """Compute the gradients of q, k and v for the gradient `do` of o."""
    shapes = [x.shape[-1] for x in (q, k, v)]
    do, q, k, v, o = (_pad_heads(x, _kernel_head(q, v)) for x in (do, q, k, v, o))
    run = _cuda_backward if uses_cuda_kernels(q.device) else _cpu_backward
    gradients = run(do, q, k, v, o, l, visible, scale)
    return [gradient[..., :size] for gradient, size in zip(gradients, shapes)]


def _kernel_head(q, v) -> int:
    """Round up to the size of heads that the kernels compute with: one for q, k and v, on CUDA a multiple of 8."""
    size = max(q.shape[-1], v.shape[-1])
    return -(-size // 8) * 8 if uses_cuda_kernels(q.device) else size


def _pad_heads(x, size: int):
    """Pad x [..., D] with zeros, which change no product, to heads of `size`; a head is contiguous."""
    if x.shape[-1] != size:
        return pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _window_arguments(visible: Visible) -> dict[str, int]:
    if visible.window == NO_WINDOW:
        return {}
    distance = visible.window - 1
    return {"window_size_left": distance, "window_size_right": 0 if visible.causal else distance}


def _bounds_arguments(q, k, bounds: Bounds | None):
    if bounds is None:
        return None, None, q.shape[1], k.shape[1]
    # with max_q = 1 the forward assumes that every sequence has exactly one query
    return bounds.queries, bounds.keys, max(bounds.max_q, 2), bounds.max_k


def _cuda_forward(q, k, v, visible: Visible, scale: float):
    o, l, *_ = flash_forward(
        q,
        k,
        v,
        *_bounds_arguments(q, k, visible.bounds),
        0.0,
        visible.causal,
        False,
        scale=scale,
        **_window_arguments(visible),
    )
    return o, l


def _cuda_backward(do, q, k, v, o, l, visible: Visible, scale: float):
    unused = q.new_empty(0)  # the state of random numbers, which only dropout has
    return flash_backward(
        do,
        q,
        k,
        v,
        o,
        l,
        *_bounds_arguments(q, k, visible.bounds),
        0.0,
        visible.causal,
        unused,
        unused,
        scale=scale,
        **_window_arguments(visible),
    )


def _for_each_query_head(x, q):
    """Repeat k or v to [B, heads of q, S, D], as the kernel for CPUs wants them."""
    return x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1)


def _cpu_arguments(q, visible: Visible, scale: float) -> dict:
    return {"attn_mask": None if visible.mask is None else visible.mask.to(q.dtype), "scale": scale}


def _cpu_forward(q, k, v, visible: Visible, scale: float):
    k, v = _for_each_query_head(k, q), _for_each_query_head(v, q)
    o, l = cpu_flash_forward(q.transpose(1, 2), k, v, 0.0, False, **_cpu_arguments(q, visible, scale))
    return o.transpose(1, 2), l.contiguous()


def _cpu_backward(do, q, k, v, o, l, visible: Visible, scale: float):
    groups, k, v = q.shape[2] // k.shape[2], _for_each_query_head(k, q), _for_each_query_head(v, q)
    arguments = _cpu_arguments(q, visible, scale)
    do, q, o = (x.transpose(1, 2) for x in (do, q, o))
    dq, dk, dv = cpu_flash_backward(do, q, k, v, o, l, 0.0, False, **arguments)
    dk, dv = (gradient.unflatten(1, (-1, groups)).sum(2) for gradient in (dk, dv))
    return [gradient.transpose(1, 2) for gradient in (dq, dk, dv)]
