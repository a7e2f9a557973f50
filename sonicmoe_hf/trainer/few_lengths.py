"""Micro-batches padded to a few lengths, so that sizes come again where those of a data set all differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.utils import logging

logger = logging.get_logger(__name__)

PADDING_DIVISOR = 10  # padding adds less than a tenth of the tokens
ALIGNMENT = 8
PLAIN = {"input_ids", "labels", "attention_mask"}


def aligned_length(length: int) -> int:
    """Round a length up to a multiple of 8: torch compiles attention with a mask apart for lengths that are none."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def few_length(length: int) -> int:
    """Round a length up to the next multiple of the largest power of two that is at most a tenth of it, or of 8.

    Between a length and its double lie ten such multiples at most.
    """
    multiple = max(1 << max((length // PADDING_DIVISOR).bit_length() - 1, 0), ALIGNMENT)
    return -(-length // multiple) * multiple


def why_not_plain(batch: Any) -> str | None:
    """Say what a micro-batch has beside input_ids, labels and attention_mask of [sequences, tokens]; None of nothing."""
    names = set(batch) if isinstance(batch, Mapping) else set()
    if not {"input_ids", "labels"} <= names:
        return "they have no input_ids and labels"
    if others := names - PLAIN:
        return f"they have {', '.join(sorted(others))} too"
    shapes = {tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in batch.values()}
    if len(shapes) > 1 or any(shape is None or len(shape) != 2 for shape in shapes):
        return "input_ids, labels and attention_mask have other shapes than [sequences, tokens]"
    return None


def with_few_lengths(trainer: Any, inputs: Any) -> Any:
    """Pad a micro-batch [B, L] after its tokens, without labels and outside attention_mask.

    Tokens keep their positions and attend to no padding. Batches with anything else in them, and sequences that ranks
    share, are returned as they are.
    """
    config = getattr(trainer.accelerator, "parallelism_config", None)
    is_shared = config is not None and (config.cp_enabled or config.sp_enabled)
    reason = "ranks share sequences" if is_shared else why_not_plain(inputs)
    if reason is not None:
        logger.warning_once(f"sonicmoe_hf: micro-batches keep their lengths, as without few_lengths: {reason}")
        return inputs
    ids = inputs["input_ids"]
    more = few_length(ids.shape[1]) - ids.shape[1]
    if not more:
        return inputs
    mask = inputs.get("attention_mask")
    fills = {"input_ids": _padding_token(trainer.model), "labels": -100, "attention_mask": 0}
    columns = {**inputs, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    return {name: pad(column, (0, more), value=fills[name]) for name, column in columns.items()}


def _padding_token(model: Any) -> int:
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else 0
