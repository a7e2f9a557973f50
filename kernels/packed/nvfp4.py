"""NVFP4 as NVIDIA's ModelOpt exports it (nvidia/Qwen3-30B-A3B-NVFP4): E2M1 values, an E4M3 scale for 16 of a row.

The format is that of modelopt/torch/quantization/qtensor/nvfp4_tensor.py and docs/source/deployment/3_unified_hf.rst in
NVIDIA/TensorRT-Model-Optimizer at 0ad6e5f0.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ..minifloat import E2M1_MAX, E4M3_MAX, e2m1_neighbours, from_e2m1, from_e4m3, to_e2m1, to_e4m3
from .format import Format, Quantized, Shapes
from .grid import Grid, Rounded

BLOCK = 16


def nvfp4_grid(scale_2: torch.Tensor) -> Grid:
    """Make the grid of a matrix. scale_2: its second scale in fp32, [] for the whole, or [rows, 1]."""

    def new_scales(largest: torch.Tensor) -> torch.Tensor:
        return to_e4m3(largest / (E2M1_MAX * scale_2)).view(torch.float8_e4m3fn)

    def factors(scales: torch.Tensor) -> torch.Tensor:
        return (from_e4m3(scales.view(torch.uint8)) * scale_2).double()

    return Grid(1, BLOCK, new_scales, factors, to_e2m1, from_e2m1, e2m1_neighbours)


class NVFP4(Format):
    """NVIDIA's NVFP4, with a scale of the whole tensor for the gates, the ups and the downs of each expert.

    codes uint8 [E, N, K/2], the first value in the LOW half; scales uint8 [E, N, K/16], the bytes of E4M3 values; state
    fp32 [E, P, Q]. A value is e2m1 * (scale * state), in fp32. Scales are ModelOpt's, of the largest magnitudes of 16
    values and of the whole tensor.
    """

    name, block, dims = "nvfp4", BLOCK, (3, 3, 3)
    suffixes, loss = ("packed", "scale", "scale_2"), 10
    values: ClassVar = {"scale": torch.float8_e4m3fn}

    def parts_and_kinds(self, packed: Quantized) -> tuple[int, int]:
        """See Format."""
        assert packed.state is not None
        return packed.state.shape[1], packed.state.shape[2]

    def _stored_shapes(self, num_experts, size_out, size_in, parts, kinds, group):
        codes, scales = ((num_experts, size_out, size_in // size) for size in (2, BLOCK))
        return Shapes(codes, scales, (num_experts, parts, kinds))

    def pack_expert(self, weight_NK: torch.Tensor, parts: int, kinds: int) -> tuple[torch.Tensor, ...]:
        """See Format."""
        largest = weight_NK.abs().view(parts, -1, kinds, weight_NK.shape[1]).amax((1, 3))
        smallest = torch.finfo(torch.float32).tiny
        state = torch.where(largest > 0, (largest / (E2M1_MAX * E4M3_MAX)).clamp(min=smallest), 1.0)
        codes, scales = nvfp4_grid(_by_row(state, len(weight_NK))).quantize(weight_NK)
        return codes, scales.view(torch.uint8), state

    def round_expert(self, packed: Quantized, expert: int, weight_NK: torch.Tensor, uniform=None) -> Rounded:
        """See Format."""
        assert packed.state is not None
        grid, scales = nvfp4_grid(_by_row(packed.state[expert], len(weight_NK))), packed.scales[expert]
        rounded = grid.round(weight_NK, scales.view(torch.float8_e4m3fn), packed.codes[expert], uniform)
        return rounded._replace(scales=rounded.scales.view(torch.uint8))

    def expert(self, packed: Quantized, expert: int) -> torch.Tensor:
        """See Format."""
        assert packed.state is not None
        codes, scales = packed.codes[expert], packed.scales[expert]
        factors = from_e4m3(scales) * _by_row(packed.state[expert], len(codes))
        return (from_e2m1(codes).view(-1, BLOCK) * factors.view(-1, 1)).view(len(codes), -1)

    def rows(self, packed: Quantized) -> list[torch.Tensor]:
        """See Format: a state's rows are the gates' and the ups'."""
        assert packed.state is not None
        return [packed.codes, packed.scales, packed.state.flatten(1)]


def _by_row(state_PQ: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Repeat the scales of parts and kinds for each row: [N, 1]."""
    parts, kinds = state_PQ.shape
    return state_PQ[:, None].expand(parts, num_rows // (parts * kinds), kinds).reshape(-1, 1)
