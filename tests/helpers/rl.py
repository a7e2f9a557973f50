"""GRPO on a CPU with an engine beside the trainer, and what a run of it must show."""

import torch
from helpers.rl_prompts import GAP, PROMPTS, SETTINGS  # noqa: F401
from helpers.trl_trainers import sentence_tokenizer, trl_trainer
from trl import GRPOConfig
from trl import GRPOTrainer as TRLsGRPOTrainer  # noqa: F401

import sonicmoe_hf
from sonicmoe_hf.trl import GRPOTrainer  # noqa: F401


def lengths(completions, **kwargs):
    """Reward tokens of few letters, so that rewards differ."""
    return [len(set(str(text))) / (1 + len(str(text))) for text in completions]


def load(base, **options):
    return sonicmoe_hf.from_pretrained(base, **{"dtype": torch.float32, **options})


def make(
    trainer_class, base, folder, config=None, lora=None, model=None, config_class=GRPOConfig, rows=PROMPTS, words=None,
    **options,
):  # fmt: skip
    """Make a trainer whose engine serves `base`."""
    model = model or load(base)
    adapter = sonicmoe_hf.lora_config(model, **{"r": 4, "experts_r": 4, **(lora or {})})
    return trl_trainer(
        trainer_class, config_class, model, rows, folder, words or sentence_tokenizer(), config={**SETTINGS, **(config or {})},
        **{"peft_config": adapter, "reward_funcs": lengths, **options},
    )  # fmt: skip


def logged_values(trainer, name="serving/largest_gap"):
    """List the values that the trainer logged under a name, one a step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def sync_once(trainer):
    """Have the engine keep the first version of the adapter."""
    sync, done = trainer.vllm_generation.sync_weights, []
    trainer.vllm_generation.sync_weights = lambda: done or done.append(sync() or 1)
    return trainer
