"""compile_layers: torch.compile of each decoder layer on its own, and a warning where it did not take one whole."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..private.torch import compiled_call, graph_breaks, set_compiled_call


def compile_layers(model: nn.Module, **options) -> int:
    """Compile each decoder layer of a model in place: one compilation serves all layers that are alike.

    Call it when the model is complete: patched, quantized, with its adapters. Gradient checkpointing may be switched on
    before or after; a layer is then computed again inside its own compiled code. A model compiled as a whole computes the
    same, but Transformers builds a causal mask inside it, and breaks its graph where checkpointing begins.

    Args:
        model: a Transformers model, PEFT's or Trainer's wrapper of one.
        options: of torch.compile, such as `mode` or `dynamic`. Lengths that change are compiled once more, for all.
    Returns:
        How many layers there are.
    Raises:
        ValueError: the model has no layer of Transformers' (a GradientCheckpointingLayer).
    Warns:
        UserWarning: at a layer's first call, where torch.compile left a part of it to Python, with torch's reason.

    Example:
        model = get_peft_model(model, sonicmoe_hf.lora_config(model))
        sonicmoe_hf.compile_layers(model)
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(models[0] if models else model).__name__} has no decoder layers that Transformers could checkpoint; "
            "use torch.compile(model)"
        )
    for layer in layers:
        layer.compile(**options)
        set_compiled_call(layer, _FirstCall(layer))
    return len(layers)


class _FirstCall:
    """The compiled call of a layer until it has been made once; a call that Dynamo traces is none."""

    def __init__(self, layer: nn.Module):
        self.layer, self.call = layer, compiled_call(layer)

    def __call__(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        before = graph_breaks()
        result = self.call(*args, **kwargs)
        set_compiled_call(self.layer, self.call)
        for reason in graph_breaks() - before:
            warnings.warn(
                f"torch.compile left a part of {type(self.layer).__name__} to Python: {reason.splitlines()[0]}",
                stacklevel=2,
            )
        return result
