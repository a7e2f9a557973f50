"""A small model of every family whose experts go through Transformers' interface, in the class
that Transformers saves."""

import importlib
import inspect

import pytest
import torch
import transformers
from helpers.architectures import NOT_MERGED, architectures
from packaging.version import Version
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from sonicmoe_hf.patching.moe_layers import find_layers

SIZES = {
    "vocab_size": 64, "unpadded_vocab_size": 60, "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 8, "intermediate_size": 24, "ffn_dim": 24, "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "moe_latent_size": 24, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "moe_num_experts": 8, "num_routed_experts": 8, "num_experts_per_tok": 2, "moe_topk": 2,
    "top_k_experts": 2, "moe_k": 2, "num_experts_per_token": 2, "moe_top_k": 2, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_start_index": 1, "num_dense_layers": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 8, "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_head_dim": 8,
    "ssm_state_size": 8, "mamba_d_state": 8, "n_groups": 2, "mamba_n_groups": 1, "chunk_size": 8, "mamba_chunk_size": 8,
    "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4, "hidden_size_per_layer_input": 0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "depth": 1, "num_heads": 4, "out_hidden_size": 32,
    "image_token_id": 60, "video_token_id": 61, "patch_size": 4,
}  # fmt: skip
WIDTH = 32  # of experts that every format packs
FOR_PACKING = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "moe_intermediate_size", "expert_ffn_hidden_size", "moe_latent_size"), WIDTH
)
LINEAR = (
    "q_proj",
    "o_proj",
    "q_a_proj",
    "kv_b_proj",
    "in_proj_qkv",
    "in_proj_qkvz",
)  # and Mamba's, which PEFT refuses
OF_TWO_LAYERS = ("layer_types", "mlp_layer_types")


def small_config(cls: type[PreTrainedConfig], own: dict | None = None, sizes: dict = SIZES) -> PreTrainedConfig:
    """Make the default config of the class with small sizes, also inside it."""
    default = cls()
    entries = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            entries[name] = small_config(type(value), (own or {}).get(name), sizes).to_dict()
        elif name in sizes and isinstance(value, int):
            entries[name] = sizes[name]
        elif name in OF_TWO_LAYERS and isinstance(value, list):
            kinds = sorted(set(value))
            entries[name] = [kinds[0], kinds[-1]]
    if "kv_lora_rank" in entries:
        entries["num_key_value_heads"] = entries["num_attention_heads"]
    for name, value in (own or {}).items():
        entries[name] = {**entries[name], **value} if isinstance(entries.get(name), dict) else value
    return cls(**entries)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CHANGES = {
    "bailing_hybrid": {"n_group": 2, "topk_group": 1},
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]}},
    "deepseek_v2": {"topk_method": "greedy", "topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots3_note": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": [64, 32],
            "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
        }
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {
        "text_config": {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "num_global_key_value_heads": 2,
        }
    },
    "glm5_next": {
        "text_config": {
            "index_kpool": 2,
            "layer_types": ["linear_attention", "indexed_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "qk_rope_head_dim": 0,
            "num_key_value_heads": 4,
        }
    },
    "glm4v_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [0, 1, 1]}}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4_vl": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 8, "num_experts": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": {"n_group": 1, "topk_group": 1, "num_expert_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "minimax_m3_vl": {"text_config": {"layer_types": ["full_attention", "minimax_m3_sparse"]}},
    "mistral4": {"head_dim": 16},
    "qwen3_omni_moe": {"audio_config": {"encoder_attention_heads": 4, "encoder_layers": 1}},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
    },
    "zaya": {"num_experts_per_tok": 1},
}


OMNI = {  # of Qwen3OmniMoeConfig: a thinker and a talker
    "thinker_config": CHANGES["qwen3_omni_moe"],
    "talker_config": {"text_config": {"shared_expert_intermediate_size": 16}, "spatial_merge_size": 2},
}
KINDS = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
DEEPSEEK_V4 = {  # a layer of each kind of attention
    "num_hidden_layers": 3, "layer_types": KINDS, "mlp_layer_types": ["moe"] * 3, "head_dim": 16, "sliding_window": 8,
    "o_groups": 2, "o_lora_rank": 8, "compress_rates": {KINDS[1]: 6, KINDS[2]: 2},
}  # fmt: skip
LATER = {"aria", "glm5_next", "qwen4_exp"}  # in 5.17 their experts have no interface, their layers other kinds
# of folders in which the language model has a type of its own, and is built alone, without the rest of the whole model
MODEL_TYPES = {folder: f"{folder}_text" for folder in ("dots3_note", "inkling", "inkling2", "qwen4_exp")}
MODEL_TYPES["qwen3_omni_moe"] = "qwen3_omni_moe_thinker"


# Families whose checkpoints are converted as no other's are, or whose modules stand elsewhere, and one of those that are
# all alike: each expert's gate, up and down in weights of their own, or names alone
OF_EACH_KIND = (
    "aria", "deepseek_ocr2", "deepseek_v4", "ernie4_5_vl_moe", "flex_olmo", "gemma4", "gpt_oss", "granitemoe", "inkling2",
    "jamba", "kimi_linear", "minimax_m3_vl", "mistral_large4", "mixtral", "nemotron_h", "qwen3_5_moe", "qwen3_moe",
    "qwen3_omni_moe", "qwen3_vl_moe", "qwen4_exp", "unlimited_ocr", "zaya",
)  # fmt: skip


def model_type_of(folder: str) -> str:
    """Find the model type of a folder's language model."""
    return MODEL_TYPES.get(folder, folder)


def families_here() -> list[str]:
    """List the families that the installed Transformers has, as CHANGES builds them."""
    without = set() if Version(transformers.__version__) >= Version("5.23") else LATER
    folders = {architecture.folder for architecture in architectures() if architecture.experts not in NOT_MERGED}
    return [folder for folder in sorted(folders - without) if model_type_of(folder) in CONFIG_MAPPING]


def slow_beyond_kinds(cases):
    """List a test's parameters, of which those whose family (alone, or the first) is not OF_EACH_KIND carry the marker
    `slow`: their checkpoints are converted as those of others."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if case[0] in OF_EACH_KIND else pytest.mark.slow) for case in cases]


def small_model(folder: str, **sizes) -> nn.Module:
    """Build the family's causal or conditional language model, with hidden pre-activations of O(1). sizes: other than
    those of SIZES."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = small_config(CONFIG_MAPPING[model_type_of(folder)], CHANGES.get(folder), {**SIZES, **sizes})
    classes = [
        cls
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if name.endswith(("ForCausalLM", "ForConditionalGeneration", "ForTokenClassification"))
        and cls.__module__ == module.__name__
    ]
    cls = next(cls for cls in classes if cls.config_class is type(config))
    torch.manual_seed(0)
    model = cls._from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model.eval()


def adapted_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """List (linear layers beside the experts, parameters of experts) of a model, for a LoRA adapter."""
    experts = {id(layer.experts) for layer in find_layers(model)}
    parameters = [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if id(module) in experts
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    ]
    modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(LINEAR) and "vision" not in name
    ]
    return modules, parameters
