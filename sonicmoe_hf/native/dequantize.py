"""Dequantisation of the two quantised kinds of checkpoint that the families come in, to bf16."""

from __future__ import annotations

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ..errors import CheckpointError

QUANTISATIONS = ("mxfp4", "fp8")
MXFP4_BLOCK = 32  # values that share a scale; two to a byte


def mxfp4_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the MXFP4 blocks and scales that stand for the weight `name` [E, in, out].

    They are packed along `in`: blocks [E, out, in / 32, 16], scales [E, out, in / 32].
    """
    num_experts, inputs, outputs = shape
    if inputs % MXFP4_BLOCK:
        raise CheckpointError(
            f"{name}_blocks: MXFP4 packs {MXFP4_BLOCK} values together, which {inputs} is no multiple of"
        )
    groups = (num_experts, outputs, inputs // MXFP4_BLOCK)
    return {f"{name}_blocks": (*groups, MXFP4_BLOCK // 2), f"{name}_scales": groups}


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 blocks [E, out, G, 16] and scales [E, out, G] -> bf16 [E, in, out], by Transformers' own function."""
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)


def _block_size(config: dict) -> tuple[int, int]:
    size = config["quantization_config"].get("weight_block_size")
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise CheckpointError(
            f"weight_block_size of the fp8 quantisation is {size!r}; it must be two sizes such as [128, 128]"
        )
    return tuple(size)


def fp8_scale_shape(shape: tuple[int, ...], config: dict) -> tuple[int, ...]:
    """The shape of the scales of an fp8 weight [rows, columns]: one scale per block, the last ones cut off."""
    if len(shape) != 2:
        raise CheckpointError(f"fp8 tensors have two dimensions; one has shape {shape}")
    return tuple(-(-size // block) for size, block in zip(shape, _block_size(config)))


def dequantise_fp8(weight: torch.Tensor, scale_inv: torch.Tensor, config: dict) -> torch.Tensor:
    """fp8 [rows, columns] times its block's scale, in fp32, rounded once to bf16."""
    block_rows, block_columns = _block_size(config)
    rows, columns = weight.shape
    scale = scale_inv.float().repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]
    return (weight.float() * scale).to(torch.bfloat16)
