"""Prompts of GRPO in tests, and how far vLLM and trainer may be apart; without TRL."""

PROMPTS = [{"prompt": text} for text in ("the dog", "the quick brown fox", "the lazy", "over the dog and the fox")] * 2
GAP = 1e-5  # fp32: two models' order of sums
SETTINGS = {
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 2,
    "learning_rate": 1e-1,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 96,
}
