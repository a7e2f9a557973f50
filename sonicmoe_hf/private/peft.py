"""PEFT's private parts, which lora/peft_wrapper.py and lora/shared_experts.py replace and read, and what
`sonicmoe-hf run` puts before one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

USED = {
    "peft.tuners.lora.layer.ParamWrapper._activate_lora": ("0.20 to 0.21", "LoRA on experts without forming W + BA"),
    "peft.tuners.lora.layer.ParamWrapper.get_param": ("0.20 to 0.21", "the dtype of an adapted weight"),
    "peft.tuners.lora.layer: _did_swap_in_out_features": (
        "0.20 to 0.21",
        "which of an adapter's sides is the input's",
    ),
    "peft.tuners.lora.layer.ParamWrapper.update_layer": ("0.20 to 0.21", "sharding the factors of experts"),
    "peft.tuners.lora.layer.ParamWrapper.get_delta_weight": ("0.20 to 0.21", "the error for merging sharded factors"),
    "peft.tuners.tuners_utils.BaseTuner._check_merge_allowed": ("0.20 to 0.21", "the error before anything is merged"),
    "peft.tuners.tuners_utils.BaseTuner.inject_adapter": ("0.20 to 0.21", "averaging the gradients of other adapters"),
    "peft.utils.save_and_load._reshard_dtensor_values_for_load": ("0.21 to 0.21", "loading the factors of experts"),
    "peft.tuners.lora.model.get_tp_plan_and_mesh": (
        "0.21 to 0.21",
        "adapters of experts under expert and tensor parallelism",
    ),
    "peft.tuners.lora.model.LoraModel._prepare_model": ("0.20 to 0.21", "sonicmoe-hf run --adapt-experts"),
    "peft.utils.other.fsdp_auto_wrap_policy": ("0.20 to 0.21", "adapters of experts under FSDP1"),
}


def before_adapters(change: Callable[[Any, Any], None]) -> None:
    """Have `change(config, model)` called with every LoraConfig and the model that PEFT is about to apply it to."""
    from peft.tuners.lora.model import LoraModel

    prepare: Any = LoraModel._prepare_model

    def prepare_model(self, peft_config, model):
        change(peft_config, model)
        prepare(self, peft_config, model)

    LoraModel._prepare_model = prepare_model  # type: ignore[method-assign]
