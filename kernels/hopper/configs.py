"""Tiles by kernel and size: a short table, measured on an H200 with benchmarks/sweep_hopper.py
(benchmarks/results/sweep_hopper.csv). Nothing is tuned at run time, and a new number of tokens changes no entry."""

import functools
from typing import NamedTuple

SMALLEST = 64  # columns of a stored piece; sizes are above it
ALIGNMENT = 8  # elements: 16 bytes
MOST_COLUMNS = 192  # of a product whose consumers take turns


class Tile(NamedTuple):
    """Columns of a product's tile; stages of the operands' ring; the most rows (256 for `gradient` in any case); whether
    work items are dealt out, not claimed (work.py)."""

    columns: int
    stages: int
    rows: int = 128
    dealt: bool = False

    def __str__(self):
        return f"{self.columns}x{self.stages}" + f"x{self.rows}" * (self.rows != 128) + " dealt" * self.dealt


# kernel -> its tiles, and how fast each computes a column relative to the others
TABLE: dict[str, dict[Tile, float]] = {
    "up": {Tile(256, 3): 1.0, Tile(128, 5): 0.85},
    "product": {Tile(192, 4): 1.0},
    "down_backward": {Tile(256, 3): 1.0, Tile(192, 4): 0.97, Tile(128, 5): 0.82},
    "gradient": {Tile(192, 3): 1.0, Tile(128, 4): 0.96},
}


@functools.cache
def tile(kernel: str, width: int) -> Tile:
    """The tile of a kernel whose product has `width` columns (2I for `up`): the one that takes the least time for the
    columns it computes, those past the last included."""
    speeds = TABLE[kernel]
    return min(speeds, key=lambda tile: -(-width // tile.columns) * tile.columns / speeds[tile])


TALL = Tile(192, 4, 192)  # of a product: an expert's last 64 rows, or fewer, go with the 128 before
ABOUT_TALL = range(97, 161)  # mean rows of an expert: every second has a few more than 128
WIDE = Tile(256, 3)  # of a product that is `DEEP`, of `MANY` rows, and whose columns it divides
DEEP, MANY = 1536, 448  # depth; mean rows of an expert, those included that token rounding may add
SHALLOW = 512  # depth of a product up to which its work items are dealt out
SHORT = Tile(128, 4)  # of a gradient over about as many rows as the stages of its ring hold, 256
ABOUT_SHORT = range(161, 321)  # mean rows of an expert, as above


@functools.cache
def product_tiles(columns: int, depth: int) -> tuple[Tile, Tile, Tile]:
    """The tiles of down or input_rows: in general, where experts have about 128 rows, and where they have many."""
    narrow = tile("product", columns)._replace(dealt=depth <= SHALLOW)
    return narrow, TALL, WIDE if depth >= DEEP and columns % WIDE.columns == 0 else narrow


def row_bucket(num_rows: int, num_experts: int) -> int:
    """Which of `product_tiles`."""
    rows = -(-num_rows // num_experts)
    return 2 if rows >= MANY else int(rows in ABOUT_TALL)


@functools.cache
def gradient_tiles(width: int) -> tuple[Tile, Tile]:
    """The tiles of a weight gradient of `width` columns in general, and where its sums are `short`."""
    return tile("gradient", width), SHORT


def short(num_rows: int, num_experts: int) -> bool:
    return -(-num_rows // num_experts) in ABOUT_SHORT


@functools.cache
def takes(*sizes: int) -> bool:
    """Whether the Hopper kernels take operands of these sizes (H, I, 2I)."""
    return all(size % ALIGNMENT == 0 and size > SMALLEST for size in sizes)
