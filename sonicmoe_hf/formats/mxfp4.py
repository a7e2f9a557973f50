"""MXFP4: E2M1 values, of which 32 of a row share a power of two, as gpt-oss and, in other words, DeepSeek-V4 have it."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..kernels.minifloat import E2M1_MAX, from_e2m1, to_e2m1
from ..kernels.quantized import SCALE_COLUMNS, Quantized
from .format import Format, check_matrix
from .fp8 import HubFP8
from .grid import POWER_BIAS, Grid, ceiled_exponent, powers_of_two

BLOCK = SCALE_COLUMNS["mxfp4"]
PAIRS = (torch.int8, torch.uint8)  # what stores two values a byte, the first in its low half


class MXFP4(Format):
    """Stored under the names of gpt-oss's checkpoints."""

    name, parts, loss = "mxfp4", ("blocks", "scales"), 12
    values: ClassVar = {"scales": torch.float8_e8m0fnu}

    def grid(self, *scales: torch.Tensor) -> Grid:
        """Of one expert: codes [rows, columns / 32, 16], scales [rows, columns / 32]."""

        def fresh(largest: torch.Tensor) -> torch.Tensor:
            exponent = ceiled_exponent(largest / E2M1_MAX).clamp(-POWER_BIAS, POWER_BIAS)
            return torch.where(largest > 0, exponent + POWER_BIAS, 0).to(torch.uint8)

        def codes(scaled: torch.Tensor) -> torch.Tensor:
            return to_e2m1(scaled).unflatten(-1, (-1, BLOCK // 2))

        return Grid(1, BLOCK, fresh, powers_of_two, codes, lambda codes: from_e2m1(codes.flatten(-2)))


class HubFP4(HubFP8):
    """DeepSeek-V4's: experts' X.weight int8 [N, K / 2] and X.scale E8M0 [N, K / 32], beside linear layers in FP8."""

    name = "mxfp4"

    def pack(self, *tensors: torch.Tensor) -> Quantized:
        """See HubFormat."""
        weight, scales = tensors
        check_matrix(weight, tuple(weight.shape), PAIRS, "an FP4 weight")
        rows, bytes_ = weight.shape
        check_matrix(scales, (rows, 2 * bytes_ // BLOCK), (torch.float8_e8m0fnu, torch.uint8), "the scales (scale)")
        return Quantized(weight.view(torch.uint8).unflatten(-1, (-1, BLOCK // 2)), scales.view(torch.uint8))

    def join_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """See HubFormat."""
        return scales.flatten(1, 2)
