"""The mask function of attn_implementation="torch_sinks": what a model hands its layers as attention_mask.

None where a query sees every key up to its own position, or of its window. Otherwise, on a CPU, eager attention's mask;
on CUDA, whose flash kernels take none, uint8 flags [B, S] for padding and for caches that are longer than what they hold
(packing.py), and for packed sequences where they start (`sequence_starts`).

Letters: B rows of a batch, T queries, S keys.
"""

from __future__ import annotations

import torch
from transformers.masking_utils import causal_mask_function, eager_mask, prepare_padding_mask

from . import flash
from .packing import KEY, QUERY, sequence_starts


def sinks_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset=0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> torch.Tensor | None:
    """Make a mask from the arguments of Transformers' mask functions.

    Raises:
        ValueError: on CUDA, for what flash kernels cannot compute: masks of the model's own or the caller's, and a
            sliding window over padding in the middle of a sequence.
    """
    device = torch.device(device)
    if not flash.uses_cuda_kernels(device):
        is_plain = allow_is_causal_skip and not use_vmap and _is_whole(q_length, kv_length, q_offset, kv_offset)
        if is_plain and _has_no_padding(attention_mask):
            return None
        return eager_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
    _check_pattern(mask_function, use_vmap)
    if attention_mask is None and _is_whole(q_length, kv_length, q_offset, kv_offset):
        packed = not allow_is_causal_skip and q_length == kv_length > 1
        return sequence_starts(_begins(mask_function, batch_size, q_length, device)) if packed else None
    return _flags(attention_mask, (batch_size, q_length, kv_length), q_offset, kv_offset, local_size, device)


def _check_pattern(mask_function, use_vmap: bool) -> None:
    if use_vmap or getattr(mask_function, "__name__", "") == "or_mask":
        raise ValueError(
            'attn_implementation="torch_sinks" computes causal, sliding and bidirectional attention on CUDA, and this '
            'model adds a mask of its own: load it with attn_implementation="eager"'
        )


def _is_whole(q_length, kv_length, q_offset, kv_offset) -> bool:
    """Tell whether the last key is the last query's; False where only the device knows."""
    return not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length


def _has_no_padding(attention_mask) -> bool:
    """Tell whether nothing is padding; False where torch.compile traces a mask."""
    return attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all()))


def _begins(mask_function, batch_size: int, length: int, device: torch.device) -> torch.Tensor:
    """Find the tokens that begin packed sequences: those that do not see the token before. Bool [B, T]."""
    batch = torch.arange(batch_size, dtype=torch.int64, device=device)[:, None]
    head, position = torch.zeros_like(batch), torch.arange(1, length, dtype=torch.int64, device=device)[None]
    sees_last = mask_function(batch, head, position, position - 1).expand(batch_size, length - 1)
    return torch.nn.functional.pad(~sees_last, (1, 0), value=True)


def _flags(attention_mask, sizes, q_offset, kv_offset: int, local_size, device: torch.device) -> torch.Tensor | None:
    """Make the flags (KEY, QUERY) of positions [B, S]; None where all are real tokens, and the last is the last query."""
    batch_size, q_length, kv_length = sizes
    position = torch.arange(kv_length, dtype=torch.int64, device=device) + kv_offset
    is_query = (position >= q_offset) & (position < q_offset + q_length)
    is_key = (position < q_offset + q_length)[None].expand(batch_size, -1)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        is_key = is_key & padding.to(device=device, dtype=torch.bool)[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling():
        begins = is_key & ~torch.nn.functional.pad(is_key[:, :-1], (1, 0))
        is_all, has_holes = torch.stack([is_key.all(), (begins.sum(1) > 1).any()]).tolist()
        if is_all and _is_whole(q_length, kv_length, q_offset, kv_offset):
            return None
        if has_holes and local_size is not None:
            raise ValueError(
                "attention_mask has zeros between ones, over which sliding windows of flash attention would reach too "
                'far: pad on one side only, or load the model with attn_implementation="eager"'
            )
    return is_key.to(torch.uint8) * KEY + is_query.to(torch.uint8) * QUERY
