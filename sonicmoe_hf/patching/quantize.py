"""quantize_experts, which packs the experts of a model in memory."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import UnsupportedExpertsError
from ..formats.declared import QUANT_METHOD, check_format
from ..formats.quantizer import (
    ExpertsQuantizationConfig,
    ExpertsQuantizer,
    check_packable,
    ignore_packed_in_ddp,
    mark_model_packed,
)
from ..formats.state_dicts import hold_packed
from ..kernels.packed.format import check_finite
from ..layer.experts_module import is_transposed, row_order
from ..layer.packed_weight import PackedWeight
from ..streaming.placement import Placement
from ..streaming.weight import HostWeight
from .forwards import unbind_liger
from .own_configs import use_own_configs

HELD_BY_HOST = (
    "experts of {model} live in host memory already, as they were loaded; pack them while they are loaded "
    "(sonicmoe_hf.from_pretrained(..., experts_quantization={format!r}, experts_memory=...)), or before they go there "
    "(quantize_experts(model, {format!r}, experts_memory=...) in place of patch_model(model, experts_memory=...))"
)


def quantize_experts(
    model: PreTrainedModel, format: str = "nf4", *, experts_memory: str | int | None = None
) -> PreTrainedModel:
    """Pack and freeze the experts of a model in memory, one weight after the other, on their devices.

    Args:
        model: a Transformers model, not yet in PEFT, DDP, FSDP or DeepSpeed. It computes with packed experts once it is
            patched (`patch_model`), before or after.
        format: "nf4" (bitsandbytes' NF4 with double quantization, 4.13 bits a weight), "mxfp4" (4.25 bits), "fp8"
            (DeepSeek's blocks of 128 x 128, 8.002 bits), "nvfp4" (NVIDIA's, 4.5 bits) or "int4" (groups of 32, 4.5 bits;
            "uint4" with a zero for each, 4.75).
        experts_memory: so many bytes of packed experts stay on the GPU, the others live in host memory; see
            `patch_model`.
    Returns:
        The same model. Save it with save_pretrained, and load it with from_pretrained.
    Raises:
        UnsupportedExpertsError: a weight is sharded, in host memory or of a size that the format does not take.
        ValueError: an unknown format, weights with NaN or infinity, or a model quantized otherwise already.
        MemoryError: host memory does not hold the experts.
    All but an error of the device come before anything is changed.
    """
    check_format("format", format)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"quantize_experts takes the Transformers model itself, not a {type(model).__name__} around it"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the model is quantized already; quantize its experts while it is loaded: "
            "sonicmoe_hf.from_pretrained(..., experts_quantization=...)"
        )
    if any(isinstance(weight, HostWeight) for weight in model.parameters()):
        raise UnsupportedExpertsError(HELD_BY_HOST.format(model=type(model).__name__, format=format))
    weights = check_packable(model, format)
    for full_name, module, name in weights:
        weight = getattr(module, name)
        if weight.is_meta:
            raise UnsupportedExpertsError(f"{full_name} is on the meta device; load the model's weights first")
        try:
            check_finite(weight)
        except ValueError as error:
            raise ValueError(f"{full_name}: {error}") from error
    placement = None if experts_memory is None else Placement(model, experts_memory, format)
    config = ExpertsQuantizationConfig(format)
    use_own_configs(model, {})
    # first, so that what an interrupted call leaves is saved as packed, and loading it names the weights that are not
    model.config.quantization_config = config
    quantizer = ExpertsQuantizer(config, pre_quantized=True)
    vars(model).update(hf_quantizer=quantizer, is_quantized=True, quantization_method=QUANT_METHOD)
    mark_model_packed(model)
    for module in model.modules():
        unbind_liger(module)
    for _, module, name in logging.tqdm(weights, desc=f"Packing experts in {format}"):
        weight, order = getattr(module, name), row_order(module, name)
        packed = PackedWeight.quantize(weight, format, is_transposed(module), order)
        hold_packed(module, name, packed if placement is None else placement.hold(module, name, packed))
    if placement is not None:
        placement.finish()
    ignore_packed_in_ddp(model)
    return model
