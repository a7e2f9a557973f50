"""NVFP4 as NVIDIA's ModelOpt exports it (nvidia/Qwen3-30B-A3B-NVFP4): E2M1 values, an E4M3 scale for 16 of a row.

The format is that of modelopt/torch/quantization/qtensor/nvfp4_tensor.py and docs/source/deployment/3_unified_hf.rst in
NVIDIA/TensorRT-Model-Optimizer at 0ad6e5f0.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ..kernels.minifloat import E2M1_MAX, from_e2m1, from_e4m3, to_e2m1, to_e4m3
from ..kernels.quantized import SCALE_COLUMNS, Quantized
from .format import Format, HubFormat, Stored
from .grid import Grid

BLOCK = SCALE_COLUMNS["nvfp4"]


class NVFP4(Format):
    """Experts whose gates and ups have a scale of the whole tensor each."""

    name, parts, loss = "nvfp4", ("packed", "scale", "scale_2"), 10
    values: ClassVar = {"scale": torch.float8_e4m3fn}

    def rows(self, packed: Quantized) -> list[torch.Tensor]:
        """See Format: a state's rows are the gates' and the ups'."""
        codes, scales, state = packed
        assert state is not None  # NVFP4 has one
        return [codes, scales, state.flatten(1)]


class HubNVFP4(HubFormat):
    """X.weight uint8 [N, K/2], two values a byte, the first in the LOW half; X.weight_scale, float8_e4m3 [N, K/16];
    X.weight_scale_2, one fp32 number. A value is e2m1 * (weight_scale * weight_scale_2), in fp32. X.input_scale, and the
    k_scale and v_scale of attention, are scales of activations, for inference alone."""

    name, dtype, scales = "nvfp4", torch.uint8, ("_scale", "_scale_2")
    unused = (".input_scale", ".k_scale", ".v_scale")

    def dense_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See HubFormat."""
        return (*shape[:-1], 2 * shape[-1])

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """See HubFormat."""
        rows, columns = shape
        shapes = (rows, columns // 2), (rows, columns // BLOCK), ()
        dtypes = self.dtype, torch.float8_e4m3fn, torch.float32
        return {part: (shape, (dtype,)) for part, shape, dtype in zip(self.names(name), shapes, dtypes)}

    def grid(self, *scales: torch.Tensor) -> Grid:
        """See HubFormat. weight_scale_2 stays: engines that fuse projections want theirs to be equal."""
        scale_2 = scales[1].reshape(())

        def fresh(largest: torch.Tensor) -> torch.Tensor:
            return to_e4m3(largest / (E2M1_MAX * scale_2)).view(torch.float8_e4m3fn)

        def factors(scales: torch.Tensor) -> torch.Tensor:
            return (from_e4m3(scales.view(torch.uint8)) * scale_2).double()

        return Grid(1, BLOCK, fresh, factors, to_e2m1, from_e2m1)

    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """See HubFormat."""
        self.check(*tensors)
        weight, scale, scale_2 = tensors
        return Quantized(weight, scale.view(torch.uint8), scale_2.reshape(1))
