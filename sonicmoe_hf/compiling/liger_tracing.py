"""PyTorch's own operations in place of Liger's kernels, in layers that torch.compile traces; Inductor fuses them.

Liger's dispatch is disabled for Dynamo, and a checkpointed layer with one graph break runs in Python as a whole.
Uncompiled code has Liger's kernels as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from ..private.replaced import replace


def _rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", *settings):
    """Compute as LlamaRMSNorm, or as GemmaRMSNorm in fp32 throughout, whose weight has an offset."""
    y = x if casting_mode == "none" else x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if casting_mode == "llama":
        y = y.to(x.dtype)
    if weight is None:
        return y.to(x.dtype)
    if casting_mode == "gemma":
        return (y * (offset + weight.float())).to(x.dtype)
    return (weight if offset == 0.0 else offset + weight) * y


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Rotate the halves of q's and k's first `rotary_dim` features [B, heads, T, D], as Llama does."""
    size = cos.shape[-1] if rotary_dim is None else rotary_dim
    if cos.shape[-1] < size:  # gpt-oss's, of one half
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin, size), _rotate(k, cos, sin, size)


def _rotate(x, cos, sin, size: int):
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if size == x.shape[-1] else torch.cat([turned, rest], dim=-1)


def _silu_mul(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    c = silu(a if gate_multiplier == 1.0 else a * gate_multiplier) * b
    return c if down_multiplier == 1.0 else c * down_multiplier


def _gelu_mul(a, b):
    return gelu(a, approximate="tanh") * b


# what Liger's modules and functions call, by the module that has the name: also those that it binds to a model's own
FUNCTIONS: dict[tuple[str, str], Callable] = {
    ("rms_norm", "LigerRMSNormFunction"): _rms_norm,
    ("rope", "LigerRopeFunction"): _rope,  # until 0.8.4
    ("rope", "dispatch"): _rope,
    ("swiglu", "LigerSiLUMulFunction"): _silu_mul,
    ("geglu", "LigerGELUMulFunction"): _gelu_mul,
}


def trace_without_liger() -> None:
    """Put PyTorch's own operations before torch.compile where models call Liger's, in this process, once Liger is
    imported."""
    for (module, name), own in FUNCTIONS.items():
        owner = sys.modules.get(f"liger_kernel.transformers.{module}")
        if hasattr(owner, name):
            make = _traceable_dispatch if name == "dispatch" else _traceable_function
            replace(owner, name, make(getattr(owner, name), own))


def _traceable_function(function: Any, own: Callable) -> type:
    """Make an object whose `apply` is an autograd.Function's, or where it is traced that of `own`."""

    class Traceable:
        @staticmethod
        def apply(*args):
            return own(*args) if torch.compiler.is_compiling() else function.apply(*args)

    return Traceable


def _traceable_dispatch(dispatch: Callable, own: Callable) -> Callable:
    def traceable(op_name, *args, **kwargs):
        return own(*args, **kwargs) if torch.compiler.is_compiling() else dispatch(op_name, *args, **kwargs)

    return traceable
