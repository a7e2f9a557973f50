"""Checks of the way in which a model with packed experts is to be distributed; errors name one that takes them."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..errors import UnsupportedModelError
from ..layer.experts_module import IMPLEMENTATION
from ..layer.holding import expert_parallel_remedy
from ..layer.packed_weight import PackedWeight
from ..private.replaced import replace
from ..streaming.weight import HostWeight

SHARDING = "replicate them by DDP, or shard them with FSDP2 (fully_shard; accelerate's fsdp_version: 2)"
PACK_COMMAND = "sonicmoe-hf convert SRC DST --layout native --quantize FORMAT"
DEEPSPEED = f"DeepSpeed does not take packed experts; {SHARDING}, or load the model in bf16 for DeepSpeed"
DEEPSPEED_ON_HOST = (
    "DeepSpeed does not take experts in host memory; replicate them by DDP, or load the model without experts_memory, in "
    "bf16"
)
SPLIT = "tensor parallelism cannot split packed experts; load the model without tp_size, or in bf16"


def check_distributed(
    model: PreTrainedModel, weights: list[str], is_linear_packed: bool = False, declared: dict | None = None
) -> None:
    """Raise UnsupportedModelError where a model that is being loaded, whose `weights` will be packed, is to be sharded in
    a way that packed weights do not take, or packed linear layers beside them. declared: as of the
    quantizer's config."""
    reason = _why_not_distributed(model, weights, is_linear_packed, declared)
    if reason is not None:
        raise UnsupportedModelError(reason)


def _why_not_distributed(
    model: PreTrainedModel, weights: list[str], is_linear_packed: bool, declared: dict | None
) -> str | None:
    if is_deepspeed_zero3_enabled():
        return DEEPSPEED
    config = getattr(model.config, "distributed_config", None)
    sizes = {
        name: getattr(config, name, None) or 1 for name in ("fsdp_size", "dp_replicate_size", "tp_size", "ep_size")
    }
    if declared is not None and sizes["tp_size"] > 1:
        return (
            f"DistributedConfig(tp_size={sizes['tp_size']}) splits linear layers that the checkpoint stores as "
            f"{declared['quant_method']}; convert the checkpoint first ({PACK_COMMAND}) or, unless they are in integers, "
            f"use fsdp_size and ep_size in its place ({expert_parallel_remedy()})"
        )
    is_ours = sizes["ep_size"] > 1 and getattr(config, "ep_implementation", None) == IMPLEMENTATION
    for name in ("fsdp_size", "dp_replicate_size"):
        if sizes[name] > 1 and not is_ours:
            return (
                f"DistributedConfig({name}={sizes[name]}) does not take packed experts; split them by expert parallelism "
                f"(ep_size, {expert_parallel_remedy()}), or load the model without it, and {SHARDING}"
            )
        if sizes[name] > 1 and is_linear_packed:
            return (
                f"DistributedConfig({name}={sizes[name]}) shards the linear layers, which cannot be packed then; leave "
                "out quantization_config"
            )
    by_experts = sizes["ep_size"] > 1 or getattr(config, "enable_expert_parallel", False)  # the latter until 5.20
    if sizes["tp_size"] > 1 and not by_experts:
        patterns = {re.sub(r"\.\d+(?=\.)", ".*", name) for name in weights}
        if not patterns.isdisjoint(model.tp_plan):
            return SPLIT
    return None


def guard_deepspeed() -> None:
    """Make deepspeed.initialize raise UnsupportedModelError for models with experts that are packed or in host memory,
    where DeepSpeed has been imported (TrainingArguments does that). Where it has not, torch's error says that it cannot
    swap these parameters."""
    deepspeed: Any = sys.modules.get("deepspeed")
    if deepspeed is None:
        return
    begin = deepspeed.initialize

    @functools.wraps(begin)
    def initialize(args=None, model: nn.Module | None = None, *others, **kwargs):
        weights = (
            [] if model is None else [weight for weight in model.parameters() if isinstance(weight, PackedWeight)]
        )
        if weights:
            is_on_host = any(isinstance(weight, HostWeight) for weight in weights)
            raise UnsupportedModelError(DEEPSPEED_ON_HOST if is_on_host else DEEPSPEED)
        return begin(args, model, *others, **kwargs)

    replace(deepspeed, "initialize", initialize)
