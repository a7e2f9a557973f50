"""The tile table of sorted rows (interface.Rows.tiles): row tiles of one expert each, and the tile scheduler's state.

A tile's entry is its expert, its first row and the end of its rows. Entries that no tile takes have expert -1. The last
one is the state (interface.Rows.scheduler_state).
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
def write_tile_table(
    tiles,
    first_row,
    end_row,
    own_expert,
    num_row_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write a program's part of the table: that of expert `own_expert`, or of E, which stands for the rest.

    An expert's part is its row tiles, behind those of the experts before it. The rest is expert -1 in the entries that no
    tile takes, and the tile scheduler's state in the last one.

    first_row, end_row [BINS]: of each expert's rows; equal from E on. num_row_tiles: the entries before the last.
    """
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
