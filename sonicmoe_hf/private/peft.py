"""PEFT's private parts, which patching/peft_adapters.py replaces and reads."""

USED = {
    "peft.tuners.lora.layer.ParamWrapper._activate_lora": ("0.20 to 0.21", "LoRA on experts without forming W + BA"),
    "peft.tuners.lora.layer.ParamWrapper.get_param": ("0.20 to 0.21", "the dtype of an adapted weight"),
    "peft.tuners.lora.layer: _did_swap_in_out_features": (
        "0.20 to 0.21",
        "which of an adapter's sides is the input's",
    ),
    "peft.tuners.lora.model.get_tp_plan_and_mesh": (
        "0.21 to 0.21",
        "adapters of experts under expert and tensor parallelism",
    ),
    "peft.utils.other.fsdp_auto_wrap_policy": ("0.20 to 0.21", "adapters of experts under FSDP1"),
}
