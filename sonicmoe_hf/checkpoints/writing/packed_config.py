"""Formats that conversion packs experts in, and what config.json says of them: every format in the native layout; in the
hub's, MXFP4 for gpt-oss, and for families that have one tensor for each expert and part FP8, and 4-bit integers as
compressed-tensors stores them. The rest stays dense."""

from __future__ import annotations

import math

from ...errors import CheckpointError
from ...formats.float_matrices import FP8Matrix
from ...formats.integer_matrices import CompressedInt4
from ...formats.quantizer import ExpertsQuantizationConfig
from ...kernels.packed import FORMATS, Format
from ...kernels.packed.fp8 import FP8_BLOCK
from ...kernels.packed.int4 import GROUP
from ..reading.source import Source

INTEGER_FORMATS = ("int4", "uint4")
FORMATS_OF = {"gpt_oss": ("mxfp4",), "per_expert": ("fp8", *INTEGER_FORMATS)}  # by the hub's layout
MXFP4_DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def check_packing(source: Source, format: str, layout: str) -> None:
    """Raise CheckpointError where the experts of `source` cannot be packed in the format in "native" or "hub" layout."""
    reason = _why_not(source, format, layout)
    if reason is not None:
        raise CheckpointError(reason)


def keeps_blocks(source: Source, layout: str) -> bool:
    """Tell whether conversion can move the blocks of quantized experts into "native" or "hub" layout as they are."""
    format = FORMATS.get(str(source.quantization))
    return format is not None and format.has_blocks_of(source.format) and not _why_not(source, format.name, layout)


def _why_not(source: Source, format: str, layout: str) -> str | None:
    reason = _why_not_on_the_hub(source, format) if layout == "hub" else None
    return reason or _why_not_from_packed(source, format, layout)


def _why_not_from_packed(source: Source, format: str, layout: str) -> str | None:
    if source.quantization not in (None, format) and (layout == "hub" or isinstance(source.format, Format)):
        remedy = "convert the bf16 checkpoint"
        if isinstance(source.format, Format):
            remedy = f"keep that format, or {remedy}"
        return (
            f"the experts would be packed as {format}, but are {source.quantization} already, and rounding twice loses "
            f"more: {remedy}"
        )
    if isinstance(source.format, Format) and source.format.is_whole:
        return (
            f"{source.folder} is packed as {source.quantization} already; from_pretrained loads it as it is (its scales "
            "have scales of 256 neighbouring blocks, which cannot be put into another order)"
        )
    return None


def _why_not_on_the_hub(source: Source, format: str) -> str | None:
    formats = FORMATS_OF.get(source.family.hub_layout, ())
    if format not in formats:
        named = [name for name in formats if name != "uint4"]  # which "int4" means too
        return (
            f"the hub has no layout for the experts of {source.family.name} in {format}, only for "
            f"{' or '.join(named) or 'none'}; for training, --layout native packs in every format"
        )
    for block, sizes in source.blocks.items():
        if format == "fp8" and (sizes.hidden % FP8_BLOCK or sizes.intermediate % FP8_BLOCK):
            return (
                f"the experts of {block} have sizes {sizes.hidden} and {sizes.intermediate}, of which not both are "
                f"multiples of {FP8_BLOCK}: Transformers takes other blocks where they are cut off; serve bf16"
            )
    return None


def matrix_format(source: Source, format: str) -> FP8Matrix | CompressedInt4 | None:
    """Choose how files in the hub layout store a matrix in this format; None of MXFP4, which they store for all experts.
    Integers have one size of groups, the largest of which the groups of all experts that are packed already consist."""
    if format not in INTEGER_FORMATS:
        return FP8Matrix() if format == "fp8" else None
    weights = (source.weights[name] for name in source.parameter_of if name in source.weights)
    groups = (weight.shape[-1] // weight.scales_header.shape[-1] for weight in weights if weight.format is not None)
    return CompressedInt4(math.gcd(*groups) or GROUP, format == "uint4")


def quantization_config(source: Source, format: str, layout: str) -> dict:
    """Make config.json's entry for a checkpoint whose experts are packed so."""
    if layout == "native":
        return ExpertsQuantizationConfig(format).to_dict()
    if format == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_DENSE}
    dense = {
        source.own_names.get(name, name).removesuffix(".weight")
        for name, weight in source.weights.items()
        # layers for multi-token prediction are among them, with experts of their own
        if name.endswith(".weight") and len(weight.shape) == 2 and name not in source.parameter_of
    }
    stored_format = matrix_format(source, format)
    if isinstance(stored_format, CompressedInt4):
        return _compressed_tensors_entry(stored_format, sorted(dense | {"lm_head"}))
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(dense | {"lm_head"}),
    }


def _compressed_tensors_entry(format: CompressedInt4, dense: list[str]) -> dict:
    """Make the entry of compressed-tensors' pack-quantized, as Kimi K2 has it."""
    weights = {"num_bits": 4, "type": "int", "symmetric": not format.has_zeros, "strategy": "group"}
    weights |= {"group_size": format.group, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": dense,
    }
