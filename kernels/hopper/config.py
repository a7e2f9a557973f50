"""Tiles by kernel and size: a short table, measured on an H200 with benchmarks/sweep/sweep_hopper.py
(benchmarks/results/sweep_hopper.csv). Nothing is tuned at run time, and a new number of tokens changes no entry."""

import functools
from typing import NamedTuple

import torch

TILE_M = 128  # rows of a tile
TILE_K = 64  # columns of both operands in a pipeline stage: 128 bytes of a 16-bit dtype
K_BLOCK = 16  # of them in one wgmma
WARPGROUP_M = 64  # rows of one wgmma, and of an epi tile
EPI_TILE_N = 64  # columns of an epi tile: what the epilogue stores at a time
SLAB_COLUMNS = 64  # columns of B that lie together in a stage: for all of TILE_K, swizzled over eight rows
SLAB_BYTES = SLAB_COLUMNS * TILE_K * 2
VECTOR = 8  # elements that one thread copies at a time: 16 bytes
THREADS = 384  # of a block: three warpgroups
CONSUMER_WARPS = 8
MIN_SIZE = 64  # H, I and 2I are above it
ALIGNMENT = 8  # H and I are multiples of it: 16 bytes
MAX_PINGPONG_COLUMNS = 192  # more columns of 128 rows are too many accumulators for one consumer


class Tile(NamedTuple):
    """A tile of a GEMM, and how its work is scheduled.

    columns, rows: CUTLASS's tile_n and tile_m (rows is 256 for `gemm_wgrad` in any case). stages: of the mainloop
    pipeline (ab_stage). static: whether the tile scheduler is static (tile_scheduler.py).
    """

    columns: int
    stages: int
    rows: int = TILE_M
    static: bool = False

    def __str__(self):
        return f"{self.columns}x{self.stages}" + f"x{self.rows}" * (self.rows != TILE_M) + " static" * self.static


# kernel -> its tiles, and how fast each computes a column relative to the others
TABLE: dict[str, dict[Tile, float]] = {
    "gemm_up": {Tile(256, 3): 1.0, Tile(128, 5): 0.85},
    "gemm_down": {Tile(192, 4): 1.0},
    "gemm_down_backward": {Tile(256, 3): 1.0, Tile(192, 4): 0.97, Tile(128, 5): 0.82},
    "gemm_wgrad": {Tile(192, 3): 1.0, Tile(128, 4): 0.96},
    "decoded gemm_up": {Tile(256, 3): 1.0, Tile(128, 5): 0.85},
    "decoded gemm_down": {Tile(256, 3): 1.0},
    "decoded gemm_down_backward": {Tile(192, 4): 1.0},
}
# Mean rows of an expert up to which a weight in a format is decoded where the tile is loaded, instead of being expanded
# to memory once: every row tile decodes it anew. 0: never. On an H200 both take the same time at some 480, 260, 370 and
# 500 rows (benchmarks/results/decoded_trial.csv); these limits are below.
MAX_DECODED_ROWS = {"int4": 384, "uint4": 192, "nf4": 320, "mxfp4": 384}


class PackedKind(NamedTuple):
    """The static facts of a packed weight that is decoded where the tile is loaded: its format, the name of its scales'
    dtype, and how many values of a row share a scale."""

    format: str
    scales: str
    group: int


def decodes(format: str, num_rows: int, num_experts: int, is_expanded: bool) -> bool:
    """Tell whether weights in a format are decoded where the tile is loaded. is_expanded: otherwise one expansion serves
    four products, instead of one each."""
    limit = MAX_DECODED_ROWS.get(format, 0)
    return num_rows <= (limit // 2 if is_expanded else limit) * num_experts


@functools.cache
def tile(kernel: str, width: int, weights: torch.dtype | PackedKind | None = None) -> Tile:
    """Choose the tile of a kernel whose product has `width` columns (2I for `gemm_up`): the one that takes the least
    time for the columns it computes, those past the last included."""
    speeds = TABLE[f"decoded {kernel}" if isinstance(weights, PackedKind) else kernel]
    return min(speeds, key=lambda tile: -(-width // tile.columns) * tile.columns / speeds[tile])


TALL = Tile(192, 4, 192)  # of gemm_down: an expert's last 64 rows, or fewer, go with the 128 before
TALL_MEAN_ROWS = range(97, 161)  # mean rows of an expert for TALL: every second expert has a few more than 128
WIDE = Tile(256, 3)  # of gemm_down at MIN_WIDE_DEPTH, from MIN_WIDE_MEAN_ROWS on, where it divides the columns
MIN_WIDE_DEPTH, MIN_WIDE_MEAN_ROWS = 1536, 448  # rows that token rounding may add are included
MAX_STATIC_DEPTH = 512  # depth of gemm_down up to which the scheduler is static
SHORT = Tile(128, 4)  # of gemm_wgrad over about as many rows as its pipeline's stages hold, 256
SHORT_MEAN_ROWS = range(161, 321)


@functools.cache
def gemm_down_tiles(
    columns: int, depth: int, weights: torch.dtype | PackedKind | None = None
) -> tuple[Tile, Tile, Tile]:
    """Choose three tiles of gemm_down: in general, where experts have about 128 rows, and where they have many."""
    if isinstance(weights, PackedKind):
        return (tile("gemm_down", columns, weights),) * 3
    narrow = tile("gemm_down", columns)._replace(static=depth <= MAX_STATIC_DEPTH)
    wide = depth >= MIN_WIDE_DEPTH and columns % WIDE.columns == 0
    return narrow, TALL, WIDE if wide else narrow


def row_bucket(num_rows: int, num_experts: int) -> int:
    """Choose among `gemm_down_tiles` by the mean rows of an expert; an index."""
    mean_rows = -(-num_rows // num_experts)
    return 2 if mean_rows >= MIN_WIDE_MEAN_ROWS else int(mean_rows in TALL_MEAN_ROWS)


@functools.cache
def gemm_wgrad_tiles(width: int) -> tuple[Tile, Tile]:
    """Choose two tiles of gemm_wgrad for `width` columns: in general, and where it sums over few rows (`is_short`)."""
    return tile("gemm_wgrad", width), SHORT


def is_short(num_rows: int, num_experts: int) -> bool:
    """Tell whether gemm_wgrad sums over few enough rows of an expert for SHORT."""
    return -(-num_rows // num_experts) in SHORT_MEAN_ROWS


@functools.cache
def supports_sizes(*sizes: int) -> bool:
    """Tell whether the Hopper kernels take operands of these sizes (H, I, 2I)."""
    return all(size % ALIGNMENT == 0 and size > MIN_SIZE for size in sizes)
