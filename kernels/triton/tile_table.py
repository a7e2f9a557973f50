"""The tile table of sorted rows (interface.Rows.tiles): row tiles of one expert each, and the tile scheduler's state.

A tile's entry is its expert, its first row and its end. The entries that are left over have expert -1, and the last one
is the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .config import SMALL_ROW_TILE


def tile_table_length(num_pairs, num_experts):
    """Bound the entries: tiles of the smallest size, of which each expert's last need not be full, and the state.

    There is no branch, so that a symbolic number of pairs brings no guard.
    """
    return (num_pairs + SMALL_ROW_TILE - 1) // SMALL_ROW_TILE + num_experts + 1


@triton.jit
def write_tiles(
    tiles,
    first_row,
    end_row,
    own_expert,
    num_row_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write the row tiles of one expert; for own_expert = E -1 in the rest of the `num_row_tiles` entries, and behind
    them the state of the tile scheduler (interface.Rows.scheduler_state). first_row, end_row [BINS]: equal past E."""
    bins = tl.arange(0, BINS)
    num_tiles = (end_row - first_row + TILE_ROWS - 1) // TILE_ROWS
    if own_expert < NUM_EXPERTS:
        tile = tl.sum(tl.where(bins < own_expert, num_tiles, 0))
        end = tl.sum(tl.where(bins == own_expert, end_row, 0))
        for row in range(tl.sum(tl.where(bins == own_expert, first_row, 0)), end, TILE_ROWS):
            tl.store(tiles + tile * 3, own_expert)
            tl.store(tiles + tile * 3 + 1, row)
            tl.store(tiles + tile * 3 + 2, tl.minimum(row + TILE_ROWS, end))
            tile += 1
    else:
        used = tl.sum(num_tiles)
        for start in range(used, num_row_tiles, BINS):
            tl.store(tiles + (start + bins) * 3, -1, mask=start + bins < num_row_tiles)
        tl.store(tiles + num_row_tiles * 3, 0)
        tl.store(tiles + num_row_tiles * 3 + 1, used)
