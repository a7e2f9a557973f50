"""A small model of every family whose experts go through Transformers' interface, in the class that Transformers saves."""

import importlib
import inspect

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 8, "intermediate_size": 24, "ffn_dim": 24, "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "moe_latent_size": 24, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "moe_num_experts": 8, "num_routed_experts": 8, "num_experts_per_tok": 2, "moe_topk": 2,
    "top_k_experts": 2, "moe_k": 2, "num_experts_per_token": 2, "moe_top_k": 2, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_start_index": 1, "num_dense_layers": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_head_dim": 8,
    "ssm_state_size": 8, "mamba_d_state": 8, "n_groups": 2, "mamba_n_groups": 1, "chunk_size": 8, "mamba_chunk_size": 8,
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "hidden_size_per_layer_input": 0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "depth": 1, "num_heads": 4, "out_hidden_size": 32,
    "image_token_id": 60, "video_token_id": 61, "patch_size": 4,
}  # fmt: skip
OF_TWO_LAYERS = ("layer_types", "mlp_layer_types")


def small_config(cls: type[PreTrainedConfig], own: dict | None = None) -> PreTrainedConfig:
    """The default config of the class with small sizes, also inside it."""
    default = cls()
    entries = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            entries[name] = small_config(type(value)).to_dict()
        elif name in SIZES and isinstance(value, int):
            entries[name] = SIZES[name]
        elif name in OF_TWO_LAYERS and isinstance(value, list):
            kinds = sorted(set(value))
            entries[name] = [kinds[0], kinds[-1]]
    if "kv_lora_rank" in entries:
        entries["num_key_value_heads"] = entries["num_attention_heads"]
    for name, value in (own or {}).items():
        entries[name] = {**entries[name], **value} if isinstance(entries.get(name), dict) else value
    return cls(**entries)


CHANGES = {
    "gemma4": {"text_config": {"enable_moe_block": True, "num_global_key_value_heads": 2}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "hunyuan_v1_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note": {"num_key_value_heads": 4},
    "mistral4": {"head_dim": 16},
}


def small_model(folder: str) -> nn.Module:
    """The family's causal or conditional language model, with hidden pre-activations of O(1)."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = small_config(CONFIG_MAPPING[folder], CHANGES.get(folder))
    classes = [
        cls
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if name.endswith(("ForCausalLM", "ForConditionalGeneration")) and cls.__module__ == module.__name__
    ]
    cls = next(cls for cls in classes if cls.config_class is type(config))
    torch.manual_seed(0)
    model = cls._from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model.eval()
