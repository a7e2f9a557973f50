"""NVFP4 checkpoints as NVIDIA's ModelOpt exports them (nvidia/Qwen3-30B-A3B-NVFP4): what they hold, and its values.

The format is that of modelopt/torch/quantization/qtensor/nvfp4_tensor.py and docs/source/deployment/3_unified_hf.rst in
NVIDIA/TensorRT-Model-Optimizer at 0ad6e5f0. In the place of a linear layer's X.weight [N, K] stand X.weight uint8
[N, K/2], two E2M1 values a byte, the first in the LOW half; X.weight_scale, float8_e4m3 [N, K/16]; X.weight_scale_2, one
fp32 number. A value is e2m1 * (weight_scale * weight_scale_2), in fp32. X.input_scale, and the k_scale and v_scale of
attention, are scales of activations, for inference alone; they are left out.
"""

from __future__ import annotations

import torch

from ..errors import CheckpointError
from .files import Header

BLOCK = 16
SCALES = ("_scale", "_scale_2")
OF_ACTIVATIONS = (".input_scale", ".k_scale", ".v_scale")


def packed_weights(tensors: dict[str, Header]) -> set[str]:
    """The names of the weights that are in NVFP4.

    Raises:
        CheckpointError: a scale is missing.
    """
    names = {name for name, header in tensors.items() if header.dtype == torch.uint8 and name.endswith(".weight")}
    for name in sorted(names):
        for end in SCALES:
            if name + end not in tensors:
                raise CheckpointError(f"{name}{end} is missing, a scale of an NVFP4 weight")
    return names


def scales(tensors: dict[str, Header], weights: set[str]) -> dict[str, tuple[int, ...]]:
    """The shapes that what stands beside `weights` must have; of activations' scales, any shape is right."""
    shapes = {name: tensors[name].shape for name in tensors if name.endswith(OF_ACTIVATIONS)}
    for name in weights:
        rows, columns = tensors[name].shape
        shapes[f"{name}_scale"] = (rows, columns * 2 // BLOCK)
        single = tensors[f"{name}_scale_2"].shape
        shapes[f"{name}_scale_2"] = single if single == (1,) else ()
    return shapes
