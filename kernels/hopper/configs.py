"""Tiles by kernel and size: a short table, measured on an H200 with benchmarks/sweep_hopper.py
(benchmarks/results/sweep_hopper.csv). Nothing is tuned at run time, and a new number of tokens changes no entry."""

import functools
from typing import NamedTuple

SMALLEST = 64  # columns of a stored piece; sizes are above it
ALIGNMENT = 8  # elements: 16 bytes


class Tile(NamedTuple):
    """Columns of a product's tile, whose rows are 128; stages of the operands' ring; pieces of h in flight beside them
    (down_backward alone)."""

    columns: int
    stages: int
    slots: int = 0


# kernel -> (columns of the product up to which a tile is used, tile), in order; the last one serves every width
TABLE: dict[str, list[tuple[float, Tile]]] = {
    "up": [(float("inf"), Tile(256, 3))],
    "product": [(float("inf"), Tile(256, 3))],
    "down_backward": [(float("inf"), Tile(256, 3, 1))],
    "gradient": [(float("inf"), Tile(256, 3))],
}


@functools.cache
def tile(kernel: str, width: int) -> Tile:
    """The tile of a kernel whose product has `width` columns (2I for `up`)."""
    return next(found for most, found in TABLE[kernel] if width <= most)


@functools.cache
def takes(*sizes: int) -> bool:
    """Whether the Hopper kernels take operands of these sizes (H, I, 2I)."""
    return all(size % ALIGNMENT == 0 and size > SMALLEST for size in sizes)
