"""TRL's trainers of reinforcement learning, sampled by vLLM: adapters are sent alone, and experts are replayed.

    from sonicmoe_hf.trl import GRPOTrainer

TRL is imported when one of them is. In the order of reading:

factory, serving              vllm_adapters, which makes a trainer, and its options
trainers, async_grpo          methods of TRL's trainers
generation, engine, server    TRL's VLLMGeneration, with vLLM in this process, or reached over HTTP
adapter_versions, gathering   the adapters that are sent
rollouts                      the experts of what was sampled
served_base, functions        checks of the weights that vLLM serves, and of the functions of TRL that are used
"""

from __future__ import annotations

import importlib
from typing import Any

from .factory import vllm_adapters

TRAINERS = {  # what each is a subclass of
    "GRPOTrainer": "trl",
    "RLOOTrainer": "trl",
    "AsyncGRPOTrainer": "trl.experimental.async_grpo",
}
__all__ = ["AsyncGRPOTrainer", "GRPOTrainer", "RLOOTrainer", "vllm_adapters"]


def __getattr__(name: str) -> Any:
    if name not in TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = vllm_adapters(getattr(importlib.import_module(TRAINERS[name]), name))
    globals()[name] = value
    return value
