"""A model with an adapter whose factors are no zeros, without TRL."""

import torch
from peft import get_peft_model

import sonicmoe_hf


def adapted(base, **options):
    """Make the model in the folder `base` with LoRA of rank 4 on experts and attention."""
    model = sonicmoe_hf.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, sonicmoe_hf.lora_config(model, **{"r": 4, "experts_r": 4, **options}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=generator)
    return model
