"""A head that is tied to the embeddings, when an adapter of one of the two is merged in memory."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel


def untie_adapted_head(model: nn.Module) -> None:
    """Untie the head of a Transformers model, where it is tied to the embeddings and an active adapter is
    on one of them: PEFT adds the product to the weight, and the other would change too.

    The config says so afterwards, so that the model is saved with both. Weights on the meta device are left as they are.
    """
    if not isinstance(model, PreTrainedModel):
        return
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    bases: list[Any] = [layer.get_base_layer() if isinstance(layer, LoraLayer) else layer for layer in layers]
    weights: list[Any] = [getattr(base, "weight", None) for base in bases]
    embeddings, head = weights
    if (
        not isinstance(head, nn.Parameter)
        or head is not embeddings
        or head.is_meta
        or not any(map(_is_adapted, layers))
    ):
        return
    bases[1].weight = nn.Parameter(head.detach().clone(), head.requires_grad)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _is_adapted(layer: Any) -> bool:
    if not isinstance(layer, LoraLayer):
        return False
    return not {*layer.lora_A, *layer.lora_embedding_A}.isdisjoint(layer.active_adapters)
