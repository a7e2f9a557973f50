"""Block shapes: a short table over GPU, dtype and rows per expert. Nothing is tuned at run time.

The row tile depends on the GPU and on rows per expert alone, because dispatch cuts rows into tiles once for all kernels;
`Blocks` holds what each kernel chooses beside it. How the entries were found: benchmarks/sweep_triton.py.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

FEW_ROWS = 192  # mean rows per expert up to which 64-row tiles win: at 128 rows, every second 128-row tile is nearly empty


class Blocks(NamedTuple):
    """Columns and depth of a tile, warps, pipeline stages, and row tiles that pass over the columns together."""

    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8


class GradientBlocks(NamedTuple):
    """A tile of a weight gradient: its two sides, rows taken at a time, warps, pipeline stages."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int


# (GPU, bytes of an element, few rows per expert) -> kernel -> blocks. The up kernel's columns are pairs (gate, up).
TABLE = {
    ("hopper", 2, False): {
        "up": Blocks(128, 64, 8, 3),
        "down": Blocks(256, 64, 8, 3),
        "down_backward": Blocks(128, 64, 8, 3),
        "input_rows": Blocks(256, 64, 8, 3),
        "gradient": GradientBlocks(128, 256, 64, 8, 3),
    },
    ("hopper", 2, True): {
        "up": Blocks(64, 64, 4, 4),
        "down": Blocks(128, 64, 4, 4),
        "down_backward": Blocks(128, 64, 4, 4),
        "input_rows": Blocks(128, 64, 4, 4),
        "gradient": GradientBlocks(128, 128, 64, 8, 3),
    },
    ("ampere", 2, False): {
        "up": Blocks(64, 32, 8, 4),
        "down": Blocks(128, 32, 8, 4),
        "down_backward": Blocks(128, 32, 8, 4),
        "input_rows": Blocks(128, 32, 8, 4),
        "gradient": GradientBlocks(128, 128, 32, 8, 4),
    },
    ("small", 2, False): {
        "up": Blocks(64, 32, 8, 3),
        "down": Blocks(128, 32, 8, 3),
        "down_backward": Blocks(128, 32, 8, 3),
        "input_rows": Blocks(128, 32, 8, 3),
        "gradient": GradientBlocks(128, 128, 32, 8, 3),
    },
    ("any", 4, False): {
        "up": Blocks(32, 32, 8, 2),
        "down": Blocks(64, 32, 8, 2),
        "down_backward": Blocks(64, 32, 8, 2),
        "input_rows": Blocks(64, 32, 8, 2),
        "gradient": GradientBlocks(64, 64, 32, 8, 2),
    },
    ("interpreter", 0, False): {
        "up": Blocks(16, 16, 1, 1, 2),
        "down": Blocks(16, 16, 1, 1, 2),
        "down_backward": Blocks(16, 16, 1, 1, 2),
        "input_rows": Blocks(16, 16, 1, 1, 2),
        "gradient": GradientBlocks(16, 16, 16, 1, 1),
    },
}


SMALLEST_TILE = 64


@functools.cache
def gpu_kind(device: torch.device) -> str:
    """Which entries of the table a device reads: by the shared memory that a block can have there."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return "hopper"
    return "ampere" if (major, minor) in ((8, 0), (8, 7)) else "small"


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """The row tile of dispatch and of every kernel over sorted rows."""
    return SMALLEST_TILE if num_pairs <= FEW_ROWS * num_experts else 128


def max_row_tiles(num_pairs: int, num_experts: int) -> int:
    """The most row tiles there can be: every expert may have one that is not full. What kernels are launched over."""
    return triton.cdiv(num_pairs, tile_rows(num_pairs, num_experts)) + num_experts


def blocks_for(kernel: str, tensor: torch.Tensor, num_pairs: int, num_experts: int):
    """The table's entry for a kernel whose operands are like `tensor`."""
    kind, size = gpu_kind(tensor.device), tensor.element_size()
    if kind == "interpreter":
        size = 0
    elif size == 4:
        kind = "any"
    few = tile_rows(num_pairs, num_experts) == SMALLEST_TILE
    return TABLE.get((kind, size, few), TABLE[kind, size, False])[kernel]
