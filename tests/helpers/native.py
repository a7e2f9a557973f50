"""Native twins of the small models: the same weights in the native layout, loaded through the Auto classes."""

import torch
from transformers import AutoModelForCausalLM

from sonicmoe_hf import convert_checkpoint


def save_both(model, folder):
    """Write the model's checkpoint in the hub layout and in the native one: their folders."""
    model.save_pretrained(folder / "hub")
    convert_checkpoint(folder / "hub", folder / "native")
    return folder / "hub", folder / "native"


def native_twin(model, folder, **options):
    """Make a native model with the weights of `model`, in training mode."""
    return AutoModelForCausalLM.from_pretrained(save_both(model, folder)[1], dtype="auto", **options).train()


def interleave(concatenated):
    """Reorder [E, 2I, ...]: all gate rows, then all up rows -> gate and up rows alternating."""
    gate, up = concatenated.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def in_native_names(tensors, family):
    """Rename weights or gradients of a family's own model, as its native twin names and orders them."""
    renamed = {}
    for name, tensor in tensors.items():
        block, _, weight = name.rpartition(".")
        if not block.endswith(".mlp.experts"):
            renamed[name] = tensor
            continue
        native = weight.replace("gate_up_proj", "c_fc").replace("down_proj", "c_proj")
        if family == "gpt_oss":
            tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        elif native == "c_fc":
            tensor = interleave(tensor)
        renamed[f"{block}.{native}"] = tensor
    return renamed
