"""A head that is tied to the embeddings, when an adapter of one of the two is merged in memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel


def untie_adapted_head(model: Any) -> None:
    """Untie the head of a Transformers model, where it is tied to the embeddings and an active adapter is
    on one of them: PEFT adds the product to the weight, and the other would change too.

    The config says so afterwards, so that the model is saved with both. Weights on the meta device are left as they are.
    """
    head = _layer_to_untie(model)
    if head is None:
        return
    head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


@contextlib.contextmanager
def without_warning(model: nn.Module) -> Iterator[None]:
    """Filter PEFT's warning of a tied head inside, where `untie_adapted_head` will untie it."""
    with warnings.catch_warnings():
        if _layer_to_untie(model) is not None:
            warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`")
        yield


def _layer_to_untie(model: Any) -> Any:
    """Find the head, without PEFT's layer around it, where it has to get a weight of its own; None elsewhere."""
    if not isinstance(model, PreTrainedModel):
        return None
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    bases: list[Any] = [layer.get_base_layer() if isinstance(layer, LoraLayer) else layer for layer in layers]
    weights: list[Any] = [getattr(base, "weight", None) for base in bases]
    embeddings, head = weights
    is_tied = isinstance(head, nn.Parameter) and head is embeddings and not head.is_meta
    return bases[1] if is_tied and any(map(_is_adapted, layers)) else None


def _is_adapted(layer: Any) -> bool:
    if not isinstance(layer, LoraLayer):
        return False
    return not {*layer.lora_A, *layer.lora_embedding_A}.isdisjoint(layer.active_adapters)
