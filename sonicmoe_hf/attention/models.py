"""The models whose attention Transformers computes eagerly alone, and which of our implementations computes it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..model_patches import NATIVE_PREFIX
from .names import TORCH_PIECES, TORCH_SINKS

SUPPORTED = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "openai_privacy_filter")
PIECES_WITH_SINKS = {  # models of "torch_pieces", and why flash kernels do not compute them
    "deepseek_v4": "its compressed keys are chosen by a mask, which flash kernels do not take",
    **dict.fromkeys(("hy_v4", "hy_v4_vl_text"), "its keys are chosen for each query, which flash kernels do not do"),
}
PIECES_WITHOUT_SINKS = ("minimax_m3_vl_text",)  # models of "torch_pieces" too, whose keys are chosen by blocks

FLASH_WITHOUT_SINKS = '"flash_attention_2" and "flash_attention_3"'
OLDEST_GPU = (8, 0)  # compute capability


def model_type_of(config) -> str:
    """Find the model_type of a text model's config; that of the hub layout for a native one."""
    return config.model_type.removeprefix(NATIVE_PREFIX)


def check_model(config) -> None:
    """Raise ValueError for a model with sinks whose attention is more than these and a window, one of "torch_pieces"."""
    reason = PIECES_WITH_SINKS.get(model_type_of(config))
    if reason is not None:
        raise ValueError(
            f'attn_implementation="{TORCH_SINKS}" does not compute {config.model_type}: {reason}; load it with '
            f'attn_implementation="{TORCH_PIECES}"'
        )


def has_sinks(model: PreTrainedModel) -> bool:
    """Tell whether this is a model of "torch_sinks"."""
    return model_type_of(model.config.get_text_config()) in SUPPORTED


def takes_pieces(model: PreTrainedModel) -> bool:
    """Tell whether `choose_attention` sets "torch_pieces" for this model."""
    return model_type_of(model.config.get_text_config()) in (*PIECES_WITH_SINKS, *PIECES_WITHOUT_SINKS)


def _obstacle(model: PreTrainedModel) -> str | None:
    """Explain why the kernels would not compute this model's training on this machine; None where they would."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no NVIDIA GPU here"
    if torch.cuda.get_device_capability() < OLDEST_GPU:
        return "the GPU's compute capability is below {}.{}".format(*OLDEST_GPU)
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"the weights are in {model.dtype}, not in bfloat16 or float16"
    dropout = getattr(model.config.get_text_config(), "attention_dropout", 0)
    return f"config.attention_dropout is {dropout}" if dropout else None


def choose_attention(model: PreTrainedModel) -> None:
    """Set a model's attention implementation: "torch_sinks" if it has sinks and this machine's GPU runs the kernels,
    "torch_pieces" if its keys are chosen for each query; leave that of other models."""
    if has_sinks(model) and _obstacle(model) is None:
        model.set_attn_implementation(TORCH_SINKS)
    if takes_pieces(model):
        text = model.config.get_text_config()
        inner = [name for name in model.config.sub_configs if getattr(model.config, name) is text]
        model.set_attn_implementation(dict.fromkeys(inner, TORCH_PIECES) if inner else TORCH_PIECES)


def describe_attention(model: PreTrainedModel) -> list[str]:
    """Describe what computes the attention of a model with sinks; no sentences for other models."""
    model_type = model_type_of(model.config.get_text_config())
    if model_type in PIECES_WITH_SINKS:
        reason = f'not "{TORCH_SINKS}", as {PIECES_WITH_SINKS[model_type]}'
        return [
            f'attention with sinks: sonicmoe_hf.from_pretrained takes attn_implementation="{TORCH_PIECES}"; {reason}'
        ]
    if model_type in PIECES_WITHOUT_SINKS:
        return [f'attention: sonicmoe_hf.from_pretrained takes attn_implementation="{TORCH_PIECES}"']
    if model_type not in SUPPORTED:
        return []
    obstacle = _obstacle(model)
    if obstacle is None:
        taken = f'sonicmoe_hf.from_pretrained takes attn_implementation="{TORCH_SINKS}", torch\'s flash kernels'
    else:
        taken = f'sonicmoe_hf.from_pretrained leaves attn_implementation="eager", as {obstacle}'
    warning = f"warning: {FLASH_WITHOUT_SINKS} have no sinks, and leave them out without an error"
    return [f"attention with sinks: {taken}", warning]
