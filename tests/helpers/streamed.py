"""Small models with their experts in host memory."""

from helpers.adapters import with_lora
from helpers.models import OF_64, build

from sonicmoe_hf import patch_model, quantize_experts
from sonicmoe_hf.streaming.placement import bytes_of, expert_layers
from sonicmoe_hf.streaming.weight import HostWeight


def small(family="qwen3_moe", layers=4, **changes):
    return build(family, **{**OF_64[family], "num_hidden_layers": layers, **changes})


def streamed(experts_memory=0, format=None, family="qwen3_moe", **changes):
    """Return a patched model with its experts where they are to be. "half": half of their bytes."""
    model = small(family, **changes)
    if experts_memory == "half":
        experts_memory = sum(bytes_of(experts, format) for _, experts in expert_layers(model)) // 2
    if format is not None:
        quantize_experts(model, format, experts_memory=experts_memory)
        patch_model(model)
    else:
        patch_model(model, experts_memory=experts_memory)
    return model


def adapted(model, checkpointing=None):
    """Return the model with an adapter, recomputed in backward by reentrant checkpointing or not, or kept."""
    model = with_lora(model, target_modules=["q_proj"])
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    return model


def host_weights(model):
    return [weight for weight in model.parameters() if isinstance(weight, HostWeight)]


def layers_of(model):
    """Return the layers that are copied, in the order of the model."""
    return list(dict.fromkeys(weight.layer for weight in host_weights(model)))


def engine_of(model):
    return host_weights(model)[0].layer.stream.copies
