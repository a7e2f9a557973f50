"""quantize_experts, and what from_pretrained(experts_quantization=...) hands to Transformers."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging
from transformers.utils.quantization_config import BitsAndBytesConfig

from ..errors import UnsupportedExpertsError, UnsupportedModelError
from ..kernels.quantized import FORMATS
from ..layer.config import check_choice
from ..layer.packed_weight import PackedWeight
from ..quantization.hub_formats import METHODS, TO_BF16, check_fp8, check_nvfp4
from ..quantization.quantizer import (
    QUANT_METHOD,
    ExpertsQuantizationConfig,
    ExpertsQuantizer,
    check_packable,
    is_transposed,
    mark_model_packed,
    order_of,
)
from ..quantization.state import hold_packed
from .own_configs import use_own_configs
from .support import REMEDIES

FOUR_BITS = tuple(format for format in FORMATS if format != "fp8")  # what a checkpoint in FP8 may become
MODELOPTS_FILE = "hf_quant_config.json"
FOR_FILE = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
FOR_CONFIG = (*FOR_FILE, "trust_remote_code")


def quantize_experts(model: PreTrainedModel, format: str = "nf4") -> PreTrainedModel:
    """Hold the experts of a model in memory packed and frozen, one weight after the other, on their devices.

    Args:
        model: a Transformers model, not yet in PEFT, DDP, FSDP or DeepSpeed. It computes with packed experts once it is
            patched (`patch_model`), before or after.
        format: "nf4" (bitsandbytes' NF4 with double quantization, 4.13 bits a weight), "mxfp4" (4.25 bits), "fp8"
            (DeepSeek's blocks of 128 x 128, 8.002 bits) or "nvfp4" (NVIDIA's, 4.5 bits).
    Returns:
        The same model. Save it with save_pretrained, and load it with from_pretrained.
    Raises:
        UnsupportedExpertsError: a weight is sharded or of a size that the format does not take; nothing is changed.
        ValueError: an unknown format, weights with NaN or infinity, or a model quantized otherwise already.
    """
    check_choice("format", format, FORMATS)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"quantize_experts takes the Transformers model itself, not a {type(model).__name__} around it"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantized already; quantize its experts while it is loaded: "
            "sonicmoe_hf.from_pretrained(..., experts_quantization=...)"
        )
    weights = check_packable(model, format)
    for full_name, module, name in weights:
        if getattr(module, name).is_meta:
            raise UnsupportedExpertsError(f"{full_name} is on the meta device; load the model's weights first")
    for full_name, module, name in logging.tqdm(weights, desc=f"Packing experts in {format}"):
        try:
            packed = PackedWeight.quantize(
                getattr(module, name), format, is_transposed(module), order_of(module, name)
            )
        except ValueError as error:
            raise ValueError(f"{full_name}: {error}") from error
        hold_packed(module, name, packed)
    config = ExpertsQuantizationConfig(format)
    use_own_configs(model, [])
    model.config.quantization_config = config
    quantizer = ExpertsQuantizer(config, pre_quantized=True)
    vars(model).update(hf_quantizer=quantizer, is_quantized=True, quantization_method=QUANT_METHOD)
    mark_model_packed(model)
    return model


def with_packed_experts(name, kwargs: dict, format: str) -> dict:
    """The keyword arguments of from_pretrained(name, **kwargs) with which Transformers loads experts packed.

    Raises:
        ValueError: an unknown format, a quantizer of the linear layers that is not bitsandbytes', or a checkpoint that is
            quantized otherwise.
    """
    check_choice("experts_quantization", format, FORMATS)
    linear = kwargs.get("quantization_config")
    if linear is not None and not isinstance(linear, BitsAndBytesConfig):
        raise ValueError(
            f"quantization_config is a {type(linear).__name__}; beside experts_quantization={format!r} it may be a "
            "BitsAndBytesConfig, for the linear layers, or None"
        )
    config = config_for(name, kwargs)
    declared = declared_quantization(config) or _modelopts(name, kwargs)
    if declared is None:
        return {**kwargs, "quantization_config": ExpertsQuantizationConfig(format, linear)}
    stored = format_in_checkpoint(declared)
    if stored not in FORMATS:
        raise ValueError(f"the checkpoint is quantized already ({stored}), which is none of our formats: {TO_BF16}")
    is_of_hub = declared["quant_method"] in METHODS
    if stored != format and not (is_of_hub and stored == "fp8" and format in FOUR_BITS):
        raise ValueError(
            f"experts_quantization is {format!r}, but the checkpoint is quantized already ({stored}); name that "
            "format, or convert the checkpoint to bf16 first: sonicmoe-hf convert SRC DST"
        )
    if linear is not None:
        raise ValueError(
            f"quantization_config cannot be given for a checkpoint that is quantized already ({stored}); leave it out"
        )
    if declared["quant_method"] != QUANT_METHOD:  # as the hub has it
        hub = {**declared, "experts": stored} if is_of_hub else None
        config.quantization_config = {**ExpertsQuantizationConfig(format).to_dict(), "hub": hub}
    return {**kwargs, "config": config}


def check_not_packed(name, kwargs: dict) -> None:
    """Raise UnsupportedModelError, with the remedy, where from_pretrained(name, **kwargs) names no format and the
    checkpoint's experts are in FP8 or NVFP4 as the hub has them. Nothing is loaded: on GPUs Transformers would keep FP8
    for kernels of its own, elsewhere it tries to make bf16 of it."""
    try:
        declared = declared_quantization(config_for(name, kwargs))
    except (OSError, ValueError):  # an adapter's folder, or what from_pretrained itself says more of
        return
    if declared is None or declared["quant_method"] not in METHODS:
        return
    if declared.get("dequantize") or getattr(kwargs.get("quantization_config"), "dequantize", False):
        return
    try:
        stored = format_in_checkpoint(declared)
    except ValueError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    words = "NVFP4" if stored == "nvfp4" else "FP8"
    raise UnsupportedModelError(f"{name} has {words} experts: {REMEDIES[declared['quant_method']]}")


def config_for(name, kwargs: dict) -> PreTrainedConfig:
    """The config with which from_pretrained(name, **kwargs) would build a model."""
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        return config
    return AutoConfig.from_pretrained(name, **{key: kwargs[key] for key in FOR_CONFIG if key in kwargs})


def _modelopts(name, kwargs: dict) -> dict | None:
    """What older exports of ModelOpt declare in a file of its own beside config.json; None without that file."""
    path = Path(name) / MODELOPTS_FILE
    if not path.parent.is_dir():
        try:
            path = Path(hf_hub_download(str(name), MODELOPTS_FILE, **{k: kwargs[k] for k in FOR_FILE if k in kwargs}))
        except (EntryNotFoundError, HFValidationError):
            return None
    if not path.is_file():
        return None
    quantization = json.loads(path.read_text()).get("quantization")
    return {"quant_method": "modelopt", **quantization} if isinstance(quantization, dict) else None


def declared_quantization(config: PreTrainedConfig) -> dict | None:
    """The quantization_config of a checkpoint's config, with the method as a str; None of one that is not quantized."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return None
    declared = declared if isinstance(declared, dict) else declared.to_dict()
    method, of_experts = (
        declared.get("quant_method"),
        getattr(config, "expert_dtype", None),
    )  # where DeepSeek-V4 has it
    beside = {} if of_experts is None else {"expert_dtype": of_experts}
    return {**beside, **declared, "quant_method": str(getattr(method, "value", method))}


def format_in_checkpoint(declared: dict) -> str:
    """The format of the experts in a quantized checkpoint: a name of FORMATS, or the method where it is none of ours.

    Raises:
        ValueError: FP8 or NVFP4 of a kind that no format here is, with the remedy.
    """
    method = declared["quant_method"]
    if method == QUANT_METHOD:
        return str(declared.get("experts"))
    if method == "fp8":
        check_fp8(declared)
        return "mxfp4" if declared.get("expert_dtype") == "fp4" else "fp8"
    if method == "modelopt":
        check_nvfp4(declared)
        return "nvfp4"
    if method == "compressed-tensors":
        return f"compressed-tensors, {_scheme(declared.get('config_groups') or {})}"
    return method


def _scheme(groups: dict) -> str:
    """What compressed-tensors says of its scales."""
    weights = [group.get("weights") or {} for group in groups.values()]
    inputs = [group.get("input_activations") or {} for group in groups.values()]
    words = f"scales by {' and '.join(sorted({str(weight.get('strategy')) for weight in weights})) or 'none'}"
    return f"{words}, static activations" if any(each.get("dynamic") is False for each in inputs) else words
