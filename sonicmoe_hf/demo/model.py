"""The small Qwen3-MoE model that the demo and the examples train: a random start, a few million parameters."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

VOCAB_SIZE = 2048
NUM_EXPERTS = 32
TOP_K = 4
PER_LAYER_LOSS = 0.01


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
