"""An error where ranks share a sequence that holds several documents: torch's ring attention, and DeepSpeed's Ulysses by
sdpa, take no mask to keep them apart."""

from __future__ import annotations

from typing import Any

import torch

SEVERAL_DOCUMENTS = (
    "position_ids begin anew inside a sequence that ranks share ({option}), so it holds several documents, which "
    "attention would not keep apart; give each document a sequence of its own, or use sp_size with "
    'DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")'
)


def checked_step(trainer: Any, training_step, model, inputs, *args, **kwargs):
    """Check the documents of a step's inputs, and call `trainer.training_step`.

    Inputs are whole sequences under `cp_size`, and this rank's slices under `sp_size`.

    Raises:
        ValueError: one of them holds several documents, which a single rank would keep apart.
    """
    config: Any = getattr(trainer.accelerator, "parallelism_config", None)
    is_whole = config is not None and config.cp_enabled
    is_cut = config is not None and config.sp_enabled and config.sp_handler.sp_attn_implementation == "sdpa"
    positions = inputs.get("position_ids") if is_whole or is_cut else None  # GRPO's inputs are a list of prompts
    if positions is not None and positions.dim() == 2 and "attention_mask" not in inputs:
        has_begin = is_whole or torch.distributed.get_rank() % config.sp_size == 0
        if (positions == 0).sum(1).max() > has_begin:  # one more begin than that of the sequence itself
            raise ValueError(SEVERAL_DOCUMENTS.format(option="cp_size" if is_whole else "sp_size"))
    return training_step(model, inputs, *args, **kwargs)
