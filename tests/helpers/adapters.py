"""PEFT's LoRA on the experts of small models, with factors that show what is paired wrongly."""

from contextlib import contextmanager
from unittest import mock

import torch
from helpers.models import batch, build, loss_and_gradients
from peft import LoraConfig, get_peft_model
from torch import nn

import sonicmoe_hf

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NATIVE_EXPERTS = ["mlp.experts.c_fc", "mlp.experts.c_proj"]
ONE_LAYER = {"num_hidden_layers": 1}
UNGATED_EXPERTS = ["mixer.experts.up_proj", "mixer.experts.down_proj"]  # of nemotron_h


def random_factors(model, seed=3):
    """Draw other factors for every expert, B not zero, so that every gradient is there from the first step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                factor = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                if hasattr(parameter, "device_mesh"):  # this takes the rank's part
                    model.load_state_dict({name: factor}, strict=False)
                else:
                    parameter.copy_(factor)
    return model


def with_lora(model, targets=None, **options):
    """Make the PEFT model with an adapter of rank 3 on the experts and random factors, unless `options` say otherwise."""
    if model.config.model_type == "nemotron_h":  # of which PEFT adapts linear layers unless told otherwise
        targets, options = targets or UNGATED_EXPERTS, {"target_modules": [], **options}
    config = LoraConfig(**{"r": 3, "lora_alpha": 6, **options}, target_parameters=targets or EXPERTS)
    return random_factors(get_peft_model(model, config))


def lora(model, parameters=EXPERTS, **options):
    """Make the config of an adapter of rank 2 on these parameters and two linear layers of the attention."""
    query = "q_a_proj" if model.config.model_type.endswith("deepseek_v3") else "q_proj"
    options = {"r": 2, "lora_alpha": 5, "target_modules": [query, "o_proj"], **options}
    return LoraConfig(**options, target_parameters=parameters)


def adapt(model, folder, parameters=EXPERTS, size=0.3, **options):
    """Make PEFT's model with the adapter that `lora` describes, of which nothing is zero, saved in `folder`."""
    return save_with_factors(get_peft_model(model, lora(model, parameters, **options)), folder, size)


def save_with_factors(adapted, folder, size=0.3):
    """Make the PEFT model with an adapter of which nothing that is trained is zero, saved in `folder`."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, size, generator=generator)
    adapted.save_pretrained(folder)
    return adapted.eval()


@contextmanager
def forbid_merging():
    """Raise AssertionError where W + BA is formed inside, as PEFT forms it."""
    with mock.patch.object(nn.utils.parametrize, "register_parametrization", side_effect=AssertionError("W + BA")):
        yield


def build_one_layer(family):
    """Build a model with one layer that has experts."""
    layers = {"deepseek_v3": {}, "nemotron_h": {"layers_block_type": ["full_attention", "moe"]}}
    return build(family, **layers.get(family, ONE_LAYER))


def patch(model, **options):
    """Patch the model, and return it."""
    sonicmoe_hf.patch_model(model, **options)
    return model


def gradients_without_merging(model, inputs=None):
    """Compute `loss_and_gradients` where W + BA may not be formed."""
    with forbid_merging():
        return loss_and_gradients(model, batch() if inputs is None else inputs)


def train_router_and_embedding(model):
    """Train the router and the embedding too: their gradients pass through every product of the experts."""
    for name, parameter in model.named_parameters():
        if name.endswith((".gate.weight", "router.weight", "embed_tokens.weight", "embeddings.weight")):
            parameter.requires_grad_(True)
    return model
