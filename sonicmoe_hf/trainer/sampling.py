"""An error where TRL would send vLLM weights of experts that it cannot send."""

from __future__ import annotations

from typing import Any

from ..layer.packed_weight import PackedWeight
from ..patching.moe_layers import every_experts

NOT_SENT = (
    "TRL merges adapters and sends vLLM whole weights, which it cannot do of {weights}, so vLLM would go on sampling "
    "from other experts; have it send adapters alone: from sonicmoe_hf.trl import GRPOTrainer, or "
    "sonicmoe_hf.vllm_adapters({trainer}) for a class of your own"
)


def check_sampling(trainer: Any) -> None:
    """Raise ValueError where a trainer samples by vLLM, to which TRL's own code would send its experts.

    `sends_adapters` is an attribute of the generation of `sonicmoe_hf.trl`.
    """
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or hasattr(generation, "sends_adapters"):
        return
    experts = set(every_experts(trainer.model))
    is_packed = any(isinstance(weight, PackedWeight) for module in experts for weight in module.parameters())
    is_adapted = any(
        type(module).__name__ == "ParamWrapper" and module.get_base_layer() in experts
        for module in trainer.model.modules()
    )
    if is_packed or is_adapted:
        weights = "packed experts" if is_packed else "adapters on experts"
        raise ValueError(NOT_SENT.format(weights=weights, trainer=type(trainer).__name__))
