"""PEFT's private parts, which lora/peft_wrapper.py and lora/shared_experts.py replace and read, and what
`sonicmoe-hf run` puts before one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def before_adapters(change: Callable[[Any, Any], None]) -> None:
    """Have `change(config, model)` called with every LoraConfig and the model that PEFT is about to apply it to."""
    from peft.tuners.lora.model import LoraModel

    prepare: Any = LoraModel._prepare_model

    def prepare_model(self, peft_config, model):
        change(peft_config, model)
        prepare(self, peft_config, model)

    LoraModel._prepare_model = prepare_model  # type: ignore[method-assign]
