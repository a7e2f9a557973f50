"""Packed sequences in models whose layers do not keep the sequences of a row apart by themselves, and rows padded left
in those whose attention counts keys from a row's start.

Patched models of some families run their attention on one sequence after the other (`one_by_one`); those of others refuse
packed sequences (`check_rows`). B rows of a batch, S tokens of a row.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.utils import is_tracing

from ..errors import UnlikeApartError
from ..private.torch import leave_to_python
from .models import SUPPORTED, model_type_of
from .names import TORCH_SINKS
from .pieces import Span, arguments_of, cut, in_patched_models
from .positions import LastAnswer, are_packed, starts_of

logger = logging.getLogger(__name__)
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
BY_KERNELS = (TORCH_SINKS, "flash")  # in names of implementations that keep sequences apart by position_ids or lengths
RECURRENT = "its recurrent layers or convolutions run over the whole row"
NO_POSITIONS = "its attention masks are made without position_ids"
FOUR_ROWS = (
    "its attention masks are made of the first row of position_ids [4, rows, tokens] alone, the tokens' own positions "
    "before those of images"
)
RECURRENT_MODELS = (
    *("bailing_hybrid", "glm5_next_text", "inkling_text", "inkling2_text", "inkling2_loop_text", "jamba"),
    *("kimi_linear", "minimax", "qwen4_exp_text", "zaya"),
)
# model types of text configs: why their layers mix sequences, and the arguments with which they do not
LEAKING: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("afmoe", "gpt_oss", "openai_privacy_filter"), (NO_POSITIONS, ())),
    **dict.fromkeys(("ernie4_5_vl_moe_text", "glm4v_moe_text", "hy_v4_vl_text"), (FOUR_ROWS, ())),
    **dict.fromkeys(RECURRENT_MODELS, (RECURRENT, ())),
    **dict.fromkeys(("granitemoehybrid", "lfm2_moe", "nemotron_h"), (RECURRENT, ("seq_idx",))),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), (RECURRENT, ("cu_seq_lens_q", "seq_idx"))),
}
POSITIONS = ("position_ids", "position_embeddings")  # a layer's arguments
COUNTED = "the model counts blocks of keys from a row's start"
PADDED = (
    f"{COUNTED}, so that with a cache a row that is padded left gets other logits than alone; where nothing is "
    "generated, call it with use_cache=False"
)
_last: LastAnswer[list[int] | None] = LastAnswer()  # of masks: the first token of each row
_warned: set[str] = set()
PAD_REMEDY = (
    "pad sequences (TRL: packing=False, padding_free=False; no packed_tokens of attach(trainer), no "
    "DataCollatorWithFlattening)"
)


def check_rows(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Check that a call of a Transformers model has no packed sequences that its layers would mix.

    With an attention_mask a row is one sequence in every family.

    Raises:
        UnlikeApartError: it has some.
    """
    config = model.config.get_text_config()
    parameters = inspect.signature(type(model).forward).parameters if args else ()
    given = {**dict(zip(list(parameters)[1:], args)), **kwargs}
    lengths, positions = [name for name in LENGTHS if given.get(name) is not None], given.get("position_ids")
    if given.get("attention_mask") is not None or (positions is None and not lengths):
        return
    by_kernels = any(name in (config._attn_implementation or "") for name in BY_KERNELS)
    model_type = model_type_of(config)
    why, needed = LEAKING.get(model_type, (None, ()))
    remedy = PAD_REMEDY
    if why is None:
        if by_kernels or positions is not None:
            return
        why, remedy = f"{config._attn_implementation!r} does not read {lengths[0]}", "give it position_ids too"
    elif why == NO_POSITIONS:
        if by_kernels:
            return
        remedy += ", or load it with flash attention" + (' ("torch_sinks")' if model_type in SUPPORTED else "")
    elif needed:
        if set(needed) <= set(lengths):
            return  # kernels take them; without its kernels Transformers raises an error
        remedy += f", or give it {' and '.join(needed)} (return_flash_attn_kwargs and return_seq_idx of that collator)"
    if lengths or _restarts(positions, why == FOUR_ROWS):
        reason = f"{type(model).__name__} would mix the sequences of a row: {why}"
        raise UnlikeApartError(
            f"{reason}. {remedy[0].upper()}{remedy[1:]}; with an attention_mask of ones a row is one sequence", reason
        )


@leave_to_python
def _restarts(position_ids: torch.Tensor | None, four_rows: bool) -> bool:
    """Tell whether position_ids, [B, S] or [4, B, S] with the tokens' own first, begin sequences inside a row."""
    if position_ids is not None and position_ids.dim() == 3 and position_ids.shape[0] == 4 and not four_rows:
        position_ids = position_ids[0]
    return are_packed({"position_ids": position_ids})


class SequenceSpan(NamedTuple):
    """The span of one sequence in a batch. shift: by how much earlier in the row its positions begin: those of a row that
    is padded left count from the row's start, unless the caller gave others."""

    span: Span
    shift: int = 0


@in_patched_models
def one_by_one(original: Callable) -> Callable:
    """Wrap the forward of attention that counts keys from a row's start, so that it runs by itself on each packed
    sequence, which position_ids tell, and on each row without the padding on its left."""
    named, cache = arguments_of(original)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = named(args, kwargs)
        if given.get(cache) is not None:
            _check_cached(given)
            return original(self, **given)
        apart = _run_apart(self, original, given)
        return original(self, **given) if apart is None else (apart, None)

    return forward


@leave_to_python
def _run_apart(self, original: Callable, given: dict[str, Any]) -> torch.Tensor | None:
    """Run a forward on each of a layer's sequences; None where each fills its row from the start on."""
    sequences = _sequences(given)
    if sequences is None:
        return None
    given = {name: value for name, value in given.items() if name not in LENGTHS}
    pieces = [original(self, **_cut_to_sequence(given, each))[0] for each in sequences]
    return _join(pieces, sequences, given)


def _sequences(given: dict[str, Any]) -> list[SequenceSpan] | None:
    """Find the sequences of a layer's call; None where each fills its row from the start on."""
    (size, length, _), mask = given["hidden_states"].shape, given["attention_mask"]
    if are_packed(given) and _all_are_tokens(mask):
        starts = starts_of(given["position_ids"], size)
        assert starts is not None, "packed rows have starts inside"
        begins = starts.tolist()
        ends = itertools.pairwise(begins)
        return [SequenceSpan(Span(first // length, first % length, (last - 1) % length + 1)) for first, last in ends]
    firsts = _first_tokens(mask, size)
    if firsts is None:
        return None
    shifts = _shifts(given, firsts)
    return [SequenceSpan(Span(row, first, length), shift) for row, (first, shift) in enumerate(zip(firsts, shifts))]


@leave_to_python
def _check_cached(given: dict[str, Any]) -> None:
    """Check a layer's call with a cache, in which keys count from a row's start: warn, once, of a row padded left.

    Raises:
        UnlikeApartError: of packed sequences.
    """
    (size, length, _), mask = given["hidden_states"].shape, given["attention_mask"]
    if length == 1:
        return
    if are_packed(given) and _all_are_tokens(mask):
        raise UnlikeApartError(
            f"{COUNTED}: with a cache, packed sequences would mix; call it with use_cache=False", COUNTED
        )
    if _first_tokens(mask, size) is not None and PADDED not in _warned:
        _warned.add(PADDED)
        logger.warning(f"sonicmoe_hf: {PADDED}")


def _see_themselves(mask: torch.Tensor) -> torch.Tensor:
    """Tell which tokens see themselves, [B, 1, S], by a mask [B, 1, S, T] of the last S of T keys, or uint8 [B, 1, S, W]
    of the W keys up to a token: padding does not, whose positions begin no sequence."""
    own = mask[..., -1] if mask.dtype == torch.uint8 else mask.diagonal(mask.shape[-1] - mask.shape[-2], -2, -1)
    return own == 0 if own.is_floating_point() else own != 0


def _all_are_tokens(mask: torch.Tensor | None) -> bool:
    return mask is None or bool(_see_themselves(mask).all())


def _first_tokens(mask: torch.Tensor | None, batch_size: int) -> list[int] | None:
    """Find the first token of each row that is no padding; None where that is the row's first for all."""
    if mask is None or mask.dim() != 4 or is_tracing(mask):
        return None

    def compute() -> list[int] | None:
        firsts = _see_themselves(mask)[:, 0].int().argmax(1).expand(batch_size).tolist()
        return firsts if any(firsts) else None

    return _last.get(mask, batch_size, compute)


def _shifts(given: dict[str, Any], firsts: list[int]) -> list[int]:
    """Find each row's `SequenceSpan.shift`: its first token's index, where that is the token's position too, else 0."""
    positions = given.get("position_ids")
    if positions is None:
        return firsts
    rows = positions.expand(len(firsts), -1)
    return [first if int(rows[row, first]) == first else 0 for row, first in enumerate(firsts)]


def _cut_to_sequence(given: dict[str, Any], sequence: SequenceSpan) -> dict[str, Any]:
    """Cut a layer's arguments to a sequence, with the positions that it has alone, and the mask to its queries and
    keys."""
    (row, first, last), shift = sequence
    piece, earlier = cut(given, sequence.span), cut(given, Span(row, first - shift, last - shift))
    piece |= {name: earlier[name] for name in POSITIONS if name in given}
    mask = given["attention_mask"]
    if mask is not None:
        mask = mask[row % mask.shape[0]][None, :, first:last]
        piece["attention_mask"] = mask if mask.dtype == torch.uint8 else mask[..., first:last]
    return piece


def _join(pieces: list[torch.Tensor], sequences: list[SequenceSpan], given: dict[str, Any]) -> torch.Tensor:
    """Join the sequences' results [1, S of a sequence, .] to [B, S, .], with zeros for tokens of none."""
    size, length, _ = given["hidden_states"].shape
    joined, end = [], 0
    for piece, ((row, first, last), _) in zip(pieces, sequences):
        joined += [piece.new_zeros(1, row * length + first - end, piece.shape[2]), piece]
        end = row * length + last
    return torch.cat(joined, 1).view(size, length, -1)
