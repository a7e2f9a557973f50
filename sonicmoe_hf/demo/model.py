"""The models with random weights that the demo and the examples train: a small one, and any at its full sizes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig

VOCAB_SIZE = 2048
NUM_EXPERTS = 32
TOP_K = 4
PER_LAYER_LOSS = 0.05  # docs/balance.md: the busiest expert gets 1.15 times the mean; at 0.01 1.6 times
QWEN3_30B_A3B: dict[str, Any] = {  # config.json of Qwen/Qwen3-30B-A3B
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_hidden_layers": 48, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "use_cache": False,
}  # fmt: skip


def small_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """4 layers, 32 experts, 4 of them per token: with 2048 tokens in a batch an expert gets 256 rows on average.

    Train it with `LoadBalancing(per_layer_loss=PER_LAYER_LOSS)`: without, the router of a random start collapses.
    """
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        initializer_range=0.05,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def random_model(name: str, layers: int | None = None, **options) -> PreTrainedModel:
    """A model with random weights and the sizes of `name`, made on the accelerator where there is one.

    Args:
        name: hub id or local folder of a config; Qwen/Qwen3-30B-A3B needs no network.
        layers: in place of the config's own number.
        options: of `AutoModelForCausalLM.from_config`, such as dtype.
    """
    sizes: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
    if name == "Qwen/Qwen3-30B-A3B":
        config = Qwen3MoeConfig(**{**QWEN3_30B_A3B, **sizes})
    else:
        config = AutoConfig.from_pretrained(name, **sizes)
    with torch.device(torch.accelerator.current_accelerator() or "cpu"):
        return AutoModelForCausalLM.from_config(config, **options)
