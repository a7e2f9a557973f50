"""LoRA's dropout, which the linear layers beside adapted experts keep, and the experts have none of.

PEFT adapts a parameter by W + BA, of which dropout of the inputs is no part, so it raises an error for a config that has
both. A config with experts of ours keeps its lora_dropout in memory. Its file says 0, which PEFT loads by itself, and
remembers the rate in auto_mapping, an entry that PEFT reads and writes as it is.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

logger = logging.getLogger(__name__)
ENTRY = "sonicmoe_hf_lora_dropout"
SAID = (
    "sonicmoe_hf: lora_dropout={rate} is of the linear layers alone: experts have none, because PEFT has no dropout for "
    "parameters (target_parameters)"
)
_said: set[float] = set()


def without_dropout(config: Any) -> Any:
    """Copy a config without its dropout, for PEFT's adapters of parameters, and warn once that experts have none."""
    rate = getattr(config, "lora_dropout", 0)
    if not rate:
        return config
    if config.target_parameters and rate not in _said:
        _said.add(rate)
        logger.warning(SAID.format(rate=rate))
    return _without(config)


def restore_dropout(config: Any) -> None:
    """Restore the dropout that an adapter's file names, where it was loaded to be trained on."""
    mapping = config.auto_mapping or {}
    if ENTRY in mapping and not config.inference_mode:
        config.lora_dropout = config.lora_dropout or mapping[ENTRY]
        config.auto_mapping = {key: value for key, value in mapping.items() if key != ENTRY} or None


def config_to_save(config: Any, auto_mapping: dict | None) -> tuple[Any, dict | None]:
    """Make (config, auto_mapping) to save in the place of an adapter's: no dropout there, and the rate in
    auto_mapping."""
    rate = getattr(config, "lora_dropout", 0)
    if not rate or not config.target_parameters:
        return config, auto_mapping
    if auto_mapping or config.task_type is not None:  # PEFT takes a mapping for one of classes
        auto_mapping = {**(auto_mapping or {}), ENTRY: rate}
    return _without(config), auto_mapping


def _without(config: Any) -> Any:
    config = copy.copy(config)
    config.lora_dropout = 0.0
    return config
