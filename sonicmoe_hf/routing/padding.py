"""Padding among a router's tokens, by the 2-D attention mask that its model was called with.

Letters: B sequences, S positions of a call, T tokens of a router.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..model_patches import FAMILIES, Family
from .calls import Forward

logger = logging.getLogger(__name__)
TOKEN_TYPES = tuple(family.token_types.argument for family in FAMILIES.values() if family.token_types is not None)


def given_mask(arguments: Mapping[str, Any], default: torch.Tensor | None = None) -> torch.Tensor | None:
    """Find the 2-D mask among a model's arguments, [B, S], or the default, that of the model around it. Of a longer one,
    which begins with a prefix or with what is cached, take the last S columns. A mask of another shape, which marks no
    tokens as padding, is given where there is no default."""
    mask = arguments.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return default
    if mask.dim() != 2:
        return mask if default is None else default
    inputs = arguments.get("input_ids")
    inputs = arguments.get("inputs_embeds") if inputs is None else inputs
    if isinstance(inputs, torch.Tensor) and inputs.dim() >= 2 and inputs.shape[1] < mask.shape[1]:
        mask = mask[:, mask.shape[1] - inputs.shape[1] :]
    return mask


def given_token_types(arguments: Mapping[str, Any], default: torch.Tensor | None) -> torch.Tensor | None:
    """Find the argument of a model that tells which tokens are an image's (`Family.token_types`), or the default."""
    for name in TOKEN_TYPES:
        if isinstance(arguments.get(name), torch.Tensor):
            return arguments[name]
    return default


def valid_tokens(
    forward: Forward, family: Family, layer_name: str, num_tokens: int, device: torch.device
) -> torch.Tensor | None:
    """Mark with False each of a router's tokens that is padding, [T]; None without a mask. Where it does not fit or has
    more dimensions than two, a warning says once that all tokens count.

    Raises:
        RuntimeError: it does not fit, in compiled code, which cannot warn.
    """
    mask = forward.attention_mask
    if mask is None:
        return None
    valid_T = mask.reshape(-1) != 0
    types = forward.token_types
    if family.token_types is not None and types is not None and types.numel() == valid_T.numel():
        is_vision_block = layer_name.rpartition(".")[2] == family.token_types.vision_block
        valid_T = valid_T[(types.reshape(-1) != 0).to(valid_T.device) == is_vision_block]
    if mask.dim() == 2 and valid_T.numel() == num_tokens:
        return valid_T.to(device)
    message = (
        f"{layer_name} has {num_tokens} tokens, which an attention mask of shape {list(mask.shape)} does not fit: "
        "padding cannot be left out of token rounding, balancing and counts. Call the model with a mask of [batch, "
        "sequence length], or without one where there is no padding"
    )
    if torch.compiler.is_compiling():
        raise RuntimeError(message)
    if not forward.call.state.has_warned_of_mask:
        forward.call.state.has_warned_of_mask = True
        logger.warning(f"sonicmoe_hf: {message}; all tokens count")
    return None
