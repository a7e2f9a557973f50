"""attn_implementation="torch_sinks": the attention function that Transformers' models call.

registration.py makes the name known to Transformers; models.py says which models take it.
"""

from __future__ import annotations

import torch

from . import flash
from .cpu_masks import causal_mask, mask_of_starts
from .flash import MAX_HEAD, NO_WINDOW
from .models import check_model
from .names import EAGER, TORCH_SINKS
from .positions import begins_of, starts_of
from .sinks import AttentionInputs, AttentionOptions, Masking, attention_with_sinks

_MISSING = object()


def sinks_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux=_MISSING,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the sinks `s_aux` [H], or without where a layer has none (None): ([B, T, H, D], None).

    Args:
        query: [B, H, T, D]; key: [B, H / G, S, D]; value: [B, H / G, S, D'] with heads of any size.
        attention_mask: what `sinks_mask` made; on a CPU any 4-D mask.
        sliding_window: a query sees its own position and sliding_window - 1 before it, and after it in a model that is
            not causal. If `is_causal` makes a causal model one that is not, it sees sliding_window before and after, as
            Transformers' masks have it.
        position_ids: [B or 1, T]; where no other mask is, a token whose position is not its predecessor's plus 1 begins
            a packed sequence.
        cu_seq_lens_q, cu_seq_lens_k: where packed sequences begin, [sequences + 1]; max_length_q, max_length_k: the
            longest, read from these if left out, for which a GPU must be waited for.
    Raises:
        ValueError: dropout, output_attentions, a cache in pages, a mask that the CUDA kernels do not take, fp32 or
            fp64 on CUDA, a device that is neither a CPU nor CUDA, or a model whose attention is something else.
    """
    _check(module, query, value, dropout, s_aux, kwargs)
    is_causal_model = getattr(module, "is_causal", True)
    if is_causal is None:
        is_causal = is_causal_model
    if is_causal_model and not is_causal and sliding_window is not None:
        sliding_window += 1  # models that are never causal do so themselves
    if not is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"attention that is not causal needs as many keys as queries; load the model with {EAGER}")
    q, k, v = (x.transpose(1, 2) for x in _cast(query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, is_causal, NO_WINDOW if sliding_window is None else sliding_window)
    if cu_seq_lens_q is not None:
        starts = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        return _attend_packed(
            AttentionInputs(q, k, v, s_aux), attention_mask, starts, options, max_length_q, max_length_k
        ), None
    if attention_mask is not None or not _tells_sequences(position_ids, q, k):
        position_ids = None
    if flash.uses_cuda_kernels(q.device):
        masking = _masking_of(attention_mask if position_ids is None else starts_of(position_ids, q.shape[0]))
    elif attention_mask is not None:
        masking = Masking(mask=_additive(attention_mask, q, k))
    else:
        numbers = None if position_ids is None else begins_of(position_ids, position_ids.shape[0]).cumsum(1)
        masking = Masking(mask=causal_mask(q, k, options, numbers))
    return attention_with_sinks(AttentionInputs(q, k, v, s_aux), masking, options), None


def _check(module, query, value, dropout, s_aux, kwargs) -> None:
    name = type(module).__name__
    check_model(module.config)
    size = max(query.shape[-1], value.shape[-1])
    unknown = [each for each in ("cache", "softcap", "position_bias") if kwargs.get(each) is not None]
    if s_aux is _MISSING:
        obstacle = f"not a {name}, which passes no sinks (s_aux)"
    elif dropout:
        obstacle = f"no dropout={dropout}: load the model with attention_dropout=0.0"
    elif kwargs.get("output_attentions"):
        obstacle = "no output_attentions=True, since it computes no probabilities"
    elif unknown:
        obstacle = f"no {unknown[0]}"
    elif query.device.type not in ("cpu", "cuda"):
        obstacle = f"tensors on a CPU and on CUDA, not on {query.device.type}"
    elif flash.uses_cuda_kernels(query.device) and size > MAX_HEAD:
        obstacle = f"heads of {MAX_HEAD} at most, not {size}"
    else:
        return
    raise ValueError(f"{TORCH_SINKS} takes {obstacle}; or load the model with {EAGER}")


def _cast(query, key, value):
    """Cast to the dtype of autocast, where it is on, as torch does for its own attention, or to the query's."""
    device, dtype = query.device, query.dtype
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"torch's flash kernels take bfloat16 and float16 on CUDA, not {dtype}: load the model with "
            f"dtype=torch.bfloat16, train under autocast, or use {EAGER}"
        )
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _masking_of(attention_mask: torch.Tensor | None) -> Masking:
    """Read the mask of the CUDA kernels, which `sinks_mask` made."""
    if attention_mask is None:
        return Masking()
    if attention_mask.dim() == 1:
        return Masking(starts_q=attention_mask)
    if attention_mask.dim() == 2 and attention_mask.dtype == torch.uint8:
        return Masking(flags=attention_mask)
    raise ValueError(
        f"{TORCH_SINKS} takes no mask of shape {tuple(attention_mask.shape)} on CUDA: pass the model a 2-D "
        f"attention_mask, or position_ids or cu_seq_lens_q of packed sequences; or load it with {EAGER}"
    )


def _attend_packed(
    inputs: AttentionInputs, attention_mask, starts, options: AttentionOptions, max_q, max_k
) -> torch.Tensor:
    """Compute all rows of the batch as one, with the packed sequences that begin at `starts`, of queries and of keys."""
    if attention_mask is not None and attention_mask.dim() == 2:
        raise ValueError("cu_seq_lens_q and an attention_mask with padding contradict each other: pass one of them")
    shape = inputs.query.shape[:2]
    q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in inputs[:3])
    rows = AttentionInputs(q, k, v, inputs.sinks)
    if flash.uses_cuda_kernels(rows.query.device):
        masking = Masking(starts_q=starts[0], starts_k=starts[1])
        options = options._replace(max_q=int(max_q or 0), max_k=int(max_k or 0))
    else:
        masking = Masking(mask=mask_of_starts(rows.query, rows.key, options, starts))
    return attention_with_sinks(rows, masking, options).squeeze(0).unflatten(0, shape)


def _additive(mask: torch.Tensor, q, k) -> torch.Tensor:
    """Turn a 4-D mask into numbers to add to the scores."""
    mask = mask[..., : k.shape[1]]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)


def _tells_sequences(position_ids, q, k) -> bool:
    """Tell whether position_ids are the tokens' own, of a call without cached keys, and may begin sequences."""
    length = q.shape[1]
    return position_ids is not None and position_ids.dim() == 2 and length == k.shape[1] == position_ids.shape[1] > 1
