"""Ways to distribute a model that packed experts do not go with: refused where they begin, with the way that works."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..errors import UnsupportedModelError
from ..layer.packed_weight import PackedWeight
from ..registration import when_imported

SHARDING = "replicate them by DDP, or shard them with FSDP2 (fully_shard; accelerate's fsdp_version: 2)"
DEEPSPEED = f"DeepSpeed does not take packed experts; {SHARDING}, or load the model in bf16 for DeepSpeed"
SPLIT = "tensor parallelism cannot split packed experts; load the model without tp_size, or in bf16"


def check_distributed(model: PreTrainedModel, weights: list[str]) -> None:
    """Raise UnsupportedModelError where a model that is being loaded, whose `weights` will be packed, is to be sharded in
    a way that packed weights do not take."""
    if is_deepspeed_zero3_enabled():
        raise UnsupportedModelError(DEEPSPEED)
    config = getattr(model.config, "distributed_config", None)
    sizes = {
        name: getattr(config, name, None) or 1 for name in ("fsdp_size", "dp_replicate_size", "tp_size", "ep_size")
    }
    for name in ("fsdp_size", "dp_replicate_size"):
        if sizes[name] > 1:
            raise UnsupportedModelError(
                f"DistributedConfig({name}={sizes[name]}) does not take packed experts; load the model without it, and "
                f"{SHARDING}"
            )
    by_experts = sizes["ep_size"] > 1 or getattr(config, "enable_expert_parallel", False)  # the latter until 5.20
    if sizes["tp_size"] > 1 and not by_experts:
        patterns = {re.sub(r"\.\d+(?=\.)", ".*", name) for name in weights}
        if not patterns.isdisjoint(model.tp_plan):
            raise UnsupportedModelError(SPLIT)


def _refusing(initialize: Callable) -> Callable:
    @functools.wraps(initialize)
    def checked(args=None, model: nn.Module | None = None, *others, **kwargs):
        if model is not None and any(isinstance(weight, PackedWeight) for weight in model.parameters()):
            raise UnsupportedModelError(DEEPSPEED)
        return initialize(args, model, *others, **kwargs)

    return checked


def _guard_deepspeed() -> None:
    deepspeed = sys.modules["deepspeed"]
    setattr(deepspeed, "initialize", _refusing(deepspeed.initialize))  # noqa: B010  (mypy refuses an assignment)


when_imported("deepspeed", _guard_deepspeed)
