"""Dequantization of FP8 checkpoints (DeepSeek's blocks) to bf16."""

from __future__ import annotations

import torch

from ..errors import CheckpointError
from ..kernels.quantized import scales_in_fp32


def block_size(config: dict) -> tuple[int, int]:
    """The rows and columns that share a scale. Raises CheckpointError where config.json does not say."""
    size = config["quantization_config"].get("weight_block_size")
    if not (isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise CheckpointError(
            f"weight_block_size of the fp8 quantization is {size!r}; it must be two sizes such as [128, 128]"
        )
    return tuple(size)


def fp8_scale_shape(shape: tuple[int, ...], config: dict) -> tuple[int, ...]:
    """The shape of the scales of an fp8 weight [rows, columns]: one scale per block, the last ones cut off."""
    if len(shape) != 2:
        raise CheckpointError(f"fp8 tensors have two dimensions; one has shape {shape}")
    return tuple(-(-size // block) for size, block in zip(shape, block_size(config)))


def dequantize_fp8(weight: torch.Tensor, scale_inv: torch.Tensor, config: dict) -> torch.Tensor:
    """fp8 [rows, columns] times its block's scale, in fp32, rounded once to bf16."""
    block_rows, block_columns = block_size(config)
    rows, columns = weight.shape
    scale = scales_in_fp32(scale_inv.view(torch.uint8) if scale_inv.dtype.itemsize == 1 else scale_inv.float())
    scale = scale.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]
    return (weight.float() * scale).to(torch.bfloat16)
