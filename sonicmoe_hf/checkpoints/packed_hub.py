"""Checkpoints whose experts are packed in the hub's own layout, as engines and Transformers read it: MXFP4 for gpt-oss,
FP8 for families that have one tensor for each expert and projection. The rest stays dense."""

from __future__ import annotations

from ..errors import CheckpointError
from ..kernels.quantized import FP8_BLOCK
from .source import Source

FORMATS_OF = {"gpt_oss": "mxfp4", "per_expert": "fp8"}  # by the hub's layout
MXFP4_DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def check_hub_format(source: Source, format: str) -> None:
    """Raise CheckpointError where the hub has no layout for this family's experts in the format, or `source` is quantized
    otherwise."""
    layout = source.family.hub_layout
    if format != FORMATS_OF.get(layout):
        raise CheckpointError(
            f"the hub has no layout for the experts of {source.family.name} in {format}, only for "
            f"{FORMATS_OF.get(layout, 'none')}; for training, --layout native packs in every format"
        )
    if source.quantization not in (None, format):
        raise CheckpointError(
            f"the experts would be packed as {format}, but are {source.quantization} already, and rounding twice loses "
            "more: keep that format, or convert the bf16 checkpoint"
        )
    for block, sizes in source.blocks.items():
        if format == "fp8" and (sizes.hidden % FP8_BLOCK or sizes.intermediate % FP8_BLOCK):
            raise CheckpointError(
                f"the experts of {block} have sizes {sizes.hidden} and {sizes.intermediate}, of which not both are "
                f"multiples of {FP8_BLOCK}: Transformers takes other blocks where they are cut off; serve bf16"
            )


def quantization_config(source: Source, format: str) -> dict:
    """config.json's entry for such a checkpoint."""
    if format == "mxfp4":
        return {"quant_method": "mxfp4", "modules_to_not_convert": MXFP4_DENSE}
    dense = {
        source.targets.get(name, name).removesuffix(".weight")
        for name in source.weights  # layers for multi-token prediction are among them, with experts of their own
        if name.endswith(".weight")
        and len(source.shape_of(name)) == 2
        and not source.is_experts(source.targets.get(name, name))
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(dense | {"lm_head"}),
    }
