"""Attention whose softmax has one more logit, the head's learned sink, that takes probability and gives no value.

With o and l from flash attention over the keys, and s the head's sink:

    L = logaddexp(l, s)            o' = o * exp(l - L)
    the flash backward with o' and L in place of o and l forms P' = exp(scores - L) and delta' = rowsum(do * o'), which
    are the softmax with the sink and its delta: so dq, dk and dv are exact
    ds = -sum over tokens of exp(s - L) * delta'

Saved for backward: q, k, v, the sinks, o' (the result) and L. Letters as in flash.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layer import torch_op
from . import flash
from .packing import Side, check_not_captured, ending_once, sides_of

CODE_DIGEST = torch_op.digest_code("attention") + torch_op.CODE_DIGEST


class AttentionInputs(NamedTuple):
    """The tensors that have gradients: query [B, T, H, D]; key and value [B, S, H / G, D], of which a value's heads may
    have another size; sinks [H], or None for attention without."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None


class Masking(NamedTuple):
    """The masking of keys: which a query may see beside what `AttentionOptions` says, in one of three forms, or all None.

    mask: for a CPU, added to the scores; it contains what the options say. flags: for the CUDA kernels, of a padded
    batch, uint8 [B, S] (packing.py). starts_q, starts_k: for the CUDA kernels, where packed sequences begin and end,
    int32 [sequences + 1], which may go on from one row of the batch to the next. Where starts_k is None it is starts_q,
    which on a CPU may repeat the number of tokens at its end.
    """

    mask: torch.Tensor | None = None
    flags: torch.Tensor | None = None
    starts_q: torch.Tensor | None = None
    starts_k: torch.Tensor | None = None


class AttentionOptions(NamedTuple):
    """The options of attention. scale: of the scores. causal, window: as flash.Visible has them. max_q, max_k: lengths of
    the longest packed sequences, 0 where they are read from the starts. code_digest: by which torch.compile's cache on
    disk tells graphs of other versions apart (CODE_DIGEST)."""

    scale: float
    causal: bool
    window: int = flash.NO_WINDOW
    max_q: int = 0
    max_k: int = 0
    code_digest: str = CODE_DIGEST


def _starts(starts: torch.Tensor, longest: int, device: torch.device) -> tuple[torch.Tensor, int]:
    if not longest:
        check_not_captured(starts)
        longest = int(starts.diff().max())
    return starts.to(device=device, dtype=torch.int32, non_blocking=True), longest


def _sides(
    inputs: AttentionInputs, masking: Masking, options: AttentionOptions
) -> tuple[Side | None, Side | None, flash.Visible]:
    """Make the packed queries and keys, None where the batch stays as it is, and find the keys that each query sees."""
    q, k = inputs.query, inputs.key
    visible = flash.Visible(options.causal, options.window, mask=masking.mask)
    if masking.flags is not None:
        queries, keys = sides_of(masking.flags, q.shape[1])
        bounds = flash.Bounds(queries.starts, keys.starts, q.shape[1], k.shape[1])
        return queries, keys, visible._replace(bounds=bounds)
    if masking.starts_q is None:
        return None, None, visible
    starts_q, starts_k = masking.starts_q, masking.starts_k
    if starts_k is None:
        if starts_q.device.type == "cpu":
            starts_q = ending_once(starts_q)
        starts_q, max_q = starts_k, max_k = _starts(starts_q, options.max_q, q.device)
    else:
        starts_q, max_q = _starts(starts_q, options.max_q, q.device)
        starts_k, max_k = _starts(starts_k, options.max_k, q.device)
    queries, keys = Side((q.shape[0], q.shape[1]), starts_q), Side((k.shape[0], k.shape[1]), starts_k)
    return queries, keys, visible._replace(bounds=flash.Bounds(starts_q, starts_k, max_q, max_k))


def _pack(side: Side | None, x: torch.Tensor) -> torch.Tensor:
    return x if side is None else side.pack(x)


def _unpack(side: Side | None, packed: torch.Tensor) -> torch.Tensor:
    return packed if side is None else side.unpack(side.clear_(packed))


def _has_nothing(inputs: AttentionInputs) -> bool:
    return inputs.query.numel() == 0 or inputs.key.numel() == 0


def _add_sinks(o: torch.Tensor, l: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute o', contiguous, and L."""
    s = sinks.to(l.dtype)[:, None]
    l = l.masked_fill_(l == torch.inf, -torch.inf)  # the CUDA kernels give +inf to a query without keys
    with_sink = torch.logaddexp(l, s)
    weight_of_keys = torch.exp(l - with_sink).transpose(-1, -2).unsqueeze(-1)
    return torch.mul(o, weight_of_keys, out=o.new_empty(o.shape)), with_sink


def _sink_gradient(do, o, l, sinks) -> torch.Tensor:
    delta = do.to(l.dtype, copy=True).mul_(o).sum(-1).transpose(-1, -2)
    each = torch.exp(sinks.to(l.dtype)[:, None] - l).mul_(delta).neg_()
    return each.sum([dim for dim in range(each.dim()) if dim != each.dim() - 2]).to(sinks.dtype)


def _attention_with_sinks(inputs: AttentionInputs, masking: Masking, options: AttentionOptions) -> list[torch.Tensor]:
    """Compute o' [B, T, H, D], and L [B, H, T], or [H, B * T] where sequences were packed."""
    if _has_nothing(inputs):
        return [like.zero_() for like in _fake_forward(inputs, masking, options)]
    q, k, v, sinks = inputs
    queries, keys, visible = _sides(inputs, masking, options)
    o, l = flash.forward(_pack(queries, q), _pack(keys, k), _pack(keys, v), visible, options.scale)
    if sinks is not None:
        o, l = _add_sinks(o, l, sinks)
    if queries is not None:
        l = queries.clear_(l, 1)
    return [_unpack(queries, o).contiguous(), l]


def _fake_forward(inputs, masking, options):
    q, v = inputs.query, inputs.value
    num_sequences, num_queries, num_heads, _ = q.shape
    is_packed = masking.flags is not None or masking.starts_q is not None
    tokens = (num_heads, num_sequences * num_queries) if is_packed else (num_sequences, num_heads, num_queries)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [q.new_empty(num_sequences, num_queries, num_heads, v.shape[-1]), q.new_empty(tokens, dtype=dtype)]


def _attention_with_sinks_backward(
    do: torch.Tensor,
    o: torch.Tensor,
    l: torch.Tensor,
    inputs: AttentionInputs,
    masking: Masking,
    options: AttentionOptions,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Compute the gradients of inputs that `needs` asks for, in their order."""
    if _has_nothing(inputs):
        return [like.zero_() for like in _fake_backward(do, o, l, inputs, masking, options, needs)]
    q, k, v, sinks = inputs
    need = AttentionInputs._make(needs)
    queries, keys, visible = _sides(inputs, masking, options)
    do, o = _pack(queries, do), _pack(queries, o)
    gradients: dict[str, torch.Tensor] = {}
    if need.query or need.key or need.value:
        packed = flash.backward(do, _pack(queries, q), _pack(keys, k), _pack(keys, v), o, l, visible, options.scale)
        for name, side, gradient in zip(AttentionInputs._fields, (queries, keys, keys), packed):
            if getattr(need, name):
                gradients[name] = _unpack(side, gradient)
    if need.sinks:
        gradients["sinks"] = _sink_gradient(do, o, l, sinks)
    return [gradients[name].contiguous() for name, needed in zip(AttentionInputs._fields, need) if needed]


def _fake_backward(do, o, l, inputs, masking, options, needs):
    return [like.new_empty(like.shape) for like, needed in zip(inputs, needs) if needed]


def _setup_context(ctx, arguments, output):
    inputs, masking, ctx.options = arguments
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs, *masking)


def _backward(ctx, do):
    """Compute the gradients of AttentionInputs, None where nobody asks for one."""
    if do is None:
        return ()
    o, l, *tensors = ctx.saved_tensors
    inputs, masking = (
        AttentionInputs._make(tensors[: len(AttentionInputs._fields)]),
        Masking._make(tensors[len(AttentionInputs._fields) :]),
    )
    needs = list(ctx.needs_input_grad[: len(inputs)])
    computed = iter(_BACKWARD.gradients(do, o, l, inputs, masking, ctx.options, needs))
    return [next(computed) if needed else None for needed in needs]


WHAT = "attention with sinks"
_FORWARD = torch_op.Op(_attention_with_sinks, _fake_forward, WHAT, _setup_context, _backward)
_BACKWARD = torch_op.GradientOp(_attention_with_sinks_backward, _fake_backward, WHAT)


def attention_with_sinks(inputs: AttentionInputs, masking: Masking, options: AttentionOptions) -> torch.Tensor:
    """Compute attention [B, T, H, D]. A query that sees no key has zeros, and gives zero gradients."""
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _FORWARD(needs_gradient, inputs, masking, options)[0]
