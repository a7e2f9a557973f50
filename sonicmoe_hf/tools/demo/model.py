"""The small model that the demo and the examples train."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

VOCAB_SIZE = 2048
NUM_EXPERTS = 32
TOP_K = 4
PER_LAYER_LOSS = 0.05  # docs/balance.md: the busiest expert gets 1.15 times the mean; at 0.01 1.6 times


def small_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Make a config of 4 layers and 32 experts, 4 of them per token.

    With 2048 tokens in a batch an expert gets 256 rows on average. Train it with
    `LoadBalancing(per_layer_loss=PER_LAYER_LOSS)`: without, the randomly initialised router collapses.
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
