"""Packed sequences in models whose layers do not keep the sequences of a row apart by themselves.

Patched models of some families run their attention on one sequence after the other (`one_by_one`); those of others refuse
packed sequences (`check_rows`). B rows of a batch, S tokens of a row.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnlikeApartError
from ..private import attributes
from .models import SUPPORTED
from .pieces import arguments_of, cut
from .positions import are_packed, starts_of

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
BY_KERNELS = ("torch_sinks", "flash")  # in names of implementations that are given position_ids or lengths
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
# model types of text configs: why, and the arguments of packed sequences with which they do not
LEAKING: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("afmoe", "gpt_oss", "openai_privacy_filter"), (NO_POSITIONS, ())),
    **dict.fromkeys(("ernie4_5_vl_moe_text", "glm4v_moe_text", "hy_v4_vl_text"), (FOUR_ROWS, ())),
    **dict.fromkeys(RECURRENT_MODELS, (RECURRENT, ())),
    **dict.fromkeys(("granitemoehybrid", "lfm2_moe", "nemotron_h"), (RECURRENT, ("seq_idx",))),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), (RECURRENT, ("cu_seq_lens_q", "seq_idx"))),
}
PAD = (
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
    why, needed = LEAKING.get(config.model_type.removeprefix("sonicmoe_"), (None, ()))
    remedy = PAD
    if why is None:
        if by_kernels or positions is not None:
            return
        why, remedy = f"{config._attn_implementation!r} does not read {lengths[0]}", "give it position_ids too"
    elif why == NO_POSITIONS:
        if by_kernels:
            return
        remedy += ", or load it with flash attention" + (' ("torch_sinks")' if config.model_type in SUPPORTED else "")
    elif needed:
        if set(needed) <= set(lengths):
            return  # kernels take them; without its kernels Transformers raises an error
        remedy += f", or give it {' and '.join(needed)} (return_flash_attn_kwargs and return_seq_idx of that collator)"
    if lengths or _restarts(positions, why == FOUR_ROWS):
        reason = f"{type(model).__name__} would mix the sequences of a row: {why}"
        raise UnlikeApartError(
            f"{reason}. {remedy[0].upper()}{remedy[1:]}; with an attention_mask of ones a row is one sequence", reason
        )


@torch.compiler.disable
def _restarts(position_ids: torch.Tensor | None, four_rows: bool) -> bool:
    """Tell whether position_ids, [B, S] or [4, B, S] with the tokens' own first, begin sequences inside a row."""
    if position_ids is not None and position_ids.dim() == 3 and position_ids.shape[0] == 4 and not four_rows:
        position_ids = position_ids[0]
    return are_packed({"position_ids": position_ids})


def one_by_one(original: Callable) -> Callable:
    """Wrap the forward of attention which counts its keys from a row's start: in patched models it is run on each packed
    sequence, as position_ids tell them, by itself."""
    named, cache = arguments_of(original)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = named(args, kwargs)
        if not vars(self).get(attributes.IN_PIECES) or given.get(cache) is not None:
            return original(self, **given)
        places = _sequences(given)
        if places is None:
            return original(self, **given)
        given = {name: value for name, value in given.items() if name not in LENGTHS}
        return _joined([original(self, **_of_sequence(given, *place))[0] for place in places], given), None

    return forward


@torch.compiler.disable
def _sequences(given: dict[str, Any]) -> list[tuple[int, int, int]] | None:
    """Find the packed sequences of a layer's call as (row, first token, token after the last); None of whole rows."""
    size, length, _ = given["hidden_states"].shape
    if not are_packed(given) or not _all_are_tokens(given["attention_mask"]):
        return None
    starts = starts_of(given["position_ids"], size)
    assert starts is not None, "packed rows have starts inside"
    begins = starts.tolist()
    return [(first // length, first % length, (last - 1) % length + 1) for first, last in itertools.pairwise(begins)]


def _all_are_tokens(mask: torch.Tensor | None) -> bool:
    """Tell whether every token sees itself, by a mask [B, 1, S, S], or uint8 [B, 1, S, W] of the W keys up to a token:
    padding does not, whose positions begin no sequence."""
    if mask is None:
        return True
    own = mask[..., -1] if mask.dtype == torch.uint8 else mask.diagonal(dim1=-2, dim2=-1)
    return bool((own == 0).all() if own.is_floating_point() else own.all())


def _of_sequence(given: dict[str, Any], row: int, first: int, last: int) -> dict[str, Any]:
    piece = cut(given, row, first, last)
    mask = given["attention_mask"]
    if mask is not None:
        mask = mask[row % mask.shape[0]][None, :, first:last]
        piece["attention_mask"] = mask if mask.dtype == torch.uint8 else mask[..., first:last]
    return piece


def _joined(pieces: list[torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
    """Join [1, S of a sequence, .] to [B, S, .]."""
    return torch.cat(pieces, 1).view(*given["hidden_states"].shape[:2], -1)
