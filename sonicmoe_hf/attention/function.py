"""torch_sinks: attention with sinks as a function of tensors, for models of one's own."""

from __future__ import annotations

import torch

from . import flash
from .cpu_masks import causal_mask
from .flash import MAX_HEAD, NO_WINDOW
from .sinks import AttentionInputs, AttentionOptions, Masking, attention_with_sinks


def torch_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Compute attention whose softmax has one more logit for each head, its learned sink, by torch's flash kernels.

    Args:
        query: [B, T, H, D]; key, value: [B, S, H / G, D], for G query heads each; bf16 or fp16 on CUDA, any float dtype
            on a CPU. sinks: [H], or None for attention without.
        scale: of the scores; D ** -0.5 unless given. causal: a query sees no key after it; with S > T the queries are the
            last of the keys. window: of a causal query's keys, its own included; None: all.
    Returns:
        [B, T, H, D], differentiable by query, key, value and sinks.
    Raises:
        ValueError: shapes that do not fit, a dtype or device that the kernels do not take, or a window without causal.
    Example:
        out = sonicmoe_hf.torch_sinks(query, key, value, sinks, window=128)
    """
    _check(query, key, value, sinks, causal, window)
    options = AttentionOptions(query.shape[-1] ** -0.5 if scale is None else scale, causal, window or NO_WINDOW)
    masking = Masking()
    if causal and not flash.uses_cuda_kernels(query.device):
        masking = Masking(mask=causal_mask(query, key, options))
    return attention_with_sinks(AttentionInputs(query, key, value, sinks), masking, options)


def _check(query, key, value, sinks, causal: bool, window: int | None) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    heads = query.shape[2] if query.dim() == 4 else 0
    on_cuda = flash.uses_cuda_kernels(query.device)
    obstacles = {
        f"query, key and value are [B, T, H, D], not {shapes}": any(len(shape) != 4 for shape in shapes),
        f"key and value {shapes[1:]} do not fit query {shapes[0]}": len(shapes[0]) == len(shapes[1]) == 4
        and (
            shapes[1][:3] != shapes[2][:3]
            or (shapes[1][0], shapes[1][3]) != (shapes[0][0], shapes[0][3])
            or heads % max(shapes[1][2], 1) != 0
        ),
        f"sinks are one for each of the {heads} heads": sinks is not None and tuple(sinks.shape) != (heads,),
        f"window is {window!r}; it counts keys of a causal query": window is not None and not (causal and window > 0),
        f"query on {query.device.type} in {query.dtype}: torch's flash kernels take bfloat16 and float16 on CUDA, and "
        "floats on a CPU": query.device.type not in ("cpu", "cuda")
        or (on_cuda and query.dtype not in (torch.bfloat16, torch.float16)),
        f"heads of {MAX_HEAD} at most on CUDA": on_cuda and max(query.shape[-1], value.shape[-1]) > MAX_HEAD,
    }
    for reason, applies in obstacles.items():
        if applies:
            raise ValueError(f"torch_sinks: {reason}")
