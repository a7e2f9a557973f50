"""The tile scheduler of the persistent kernels: which work tiles a block computes, and how its warps learn of them.

Two schedules (config.Tile.static):

    dynamic   A block takes the next work tile from a counter in global memory when it begins the one before. A block
              whose tiles have few rows takes more of them, and no block waits for another at the end.
    static    For products of little depth: seven eighths of the work tiles are assigned round by round, one per block, so
    that blocks that
              share operands stay in step. Each round is shifted by one block: a block that always got tiles with few
              rows would run ahead of the others, and out of what L2 holds. The last eighth is scheduled dynamically.

The counter (interface.Rows.scheduler_state) is zero before a launch and zero again after it. Launches that share a
counter must run one after the other, as those on one stream do.

The first warp of a block fetches a work tile and shares it through a pipeline of SCHEDULER_STAGES in shared memory:

    barrier      arrivals                      signalled by               waited for by
    full[s]      1                             warp 0, tile written       every other warp that takes part
    empty[s]     all warps that read it        each warp, tile read       warp 0, before it writes stage s again
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .arrivals import Arrivals

SCHEDULER_STAGES = 4  # work tiles shared that not every warp has read yet


class WorkTile(NamedTuple):
    """Rows first .. end of an expert, and the index of a column tile, or of a tile of its weight gradient.

    expert -1: there is no more work.
    """

    expert: Int32
    first: Int32
    end: Int32
    tile: Int32


NO_WORK = WorkTile(Int32(-1), Int32(0), Int32(0), Int32(0))


@dataclass(frozen=True)
class TileScheduler:
    """A block's tile scheduler.

    counter: how many work tiles all blocks have taken. num_work_tiles: how many there are. slots: (4, SCHEDULER_STAGES),
    the shared work tiles. full: the full barriers of the stages, then the empty ones. static: the schedule, see above.
    `tile_count` counts the work tiles that a warp has shared or received.
    """

    counter: cute.Pointer
    num_work_tiles: Int32
    slots: cute.Tensor
    full: cute.Pointer
    static: bool
    arrivals: Arrivals

    @property
    def empty(self):
        return self.full + SCHEDULER_STAGES

    def initial_index(self):
        """Compute the index of a block's first work tile, -1 where there is none."""
        return _index_or_none(cute.arch.block_idx()[0], self.num_work_tiles)

    def prefetch_dynamic(self):
        """Take the index of the next work tile, for `broadcast`; called by warp 0 when it begins a work tile, and
        nothing waits for it."""
        return _next_dynamic(self.counter, self.num_work_tiles)

    def prefetch(self, index, tile_count):
        """Take the index of the next work tile by this tile's schedule; `index` is the begun work tile's."""
        if self.static:
            return _next_static(self.counter, self.num_work_tiles, index, tile_count)
        return self.prefetch_dynamic()

    def broadcast(self, index):
        """Hand the result of `prefetch` to every lane; -1 where there is no more work."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(index, 0))

    def share(self, warp, work_tile, tile_count):
        """Share warp 0's work tile with the other producer warps, which receive it. Return it."""
        self.arrivals.count("scheduler.full", 1)
        self.arrivals.count("scheduler.empty", self.arrivals.warps - 1)
        return _share(self.slots, self.full, self.empty, warp, *work_tile, tile_count)

    def receive(self, tile_count) -> WorkTile:
        """Receive the work tile; called by every other warp."""
        self.arrivals.count("scheduler.empty", self.arrivals.warps)
        return WorkTile(*_receive(self.slots, self.full, self.empty, tile_count))


def rasterize(index, num_rows, num_columns: int, rows_together: int):
    """Compute (row, column) of the tile `index` of num_rows x num_columns tiles, of which `rows_together` rows at a time
    pass over all columns."""
    group = index // (rows_together * num_columns)
    in_group = index - group * (rows_together * num_columns)
    rows = cutlass.min(num_rows - group * rows_together, rows_together)
    column = in_group // rows
    return group * rows_together + in_group - column * rows, column


def arrive_counts(num_reading_warps: int):
    """Name the arrive counts of a scheduler's barriers; `num_reading_warps`: those beside warp 0."""
    return {"scheduler.full": 1, "scheduler.empty": num_reading_warps}


@cute.jit
def _index_or_none(index: Int32, num_work_tiles: Int32):
    if index >= num_work_tiles:
        index = Int32(-1)
    return index


@cute.jit
def _next_dynamic(counter, num_work_tiles: Int32, static_rounds=1):
    index, blocks = Int32(0), cute.arch.grid_dim()[0]
    if cute.arch.lane_idx() == 0:
        before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        # each work tile begun in the last static round or later increments the counter once; the last of them resets it
        if before == num_work_tiles - 1 - (static_rounds - 1) * blocks:
            cute.arch.atomic_exch(counter, Int32(0), sem="relaxed", scope="gpu")
        index = _index_or_none(before + static_rounds * blocks, num_work_tiles)
    return index


@cute.jit
def _next_static(counter, num_work_tiles: Int32, index: Int32, tile_count: Int32):
    blocks = cute.arch.grid_dim()[0]
    rounds = cutlass.max(num_work_tiles * 7 // 8 // blocks, 1)
    if tile_count < rounds:
        index += blocks + 1
        if index >= (tile_count + 1) * blocks:
            index -= blocks
    else:
        index = _next_dynamic(counter, num_work_tiles, rounds)
    return index


@cute.jit
def _send(slots: cute.Tensor, full, empty, expert: Int32, first: Int32, end: Int32, tile: Int32, tile_count: Int32):
    stage = tile_count % SCHEDULER_STAGES
    cute.arch.mbarrier_wait(empty + stage, (tile_count // SCHEDULER_STAGES & 1) ^ 1)
    if cute.arch.lane_idx() == 0:
        slots[0, stage], slots[1, stage], slots[2, stage], slots[3, stage] = expert, first, end, tile
        cute.arch.mbarrier_arrive(full + stage)
    cute.arch.sync_warp()


@cute.jit
def _share(
    slots: cute.Tensor, full, empty, warp, expert: Int32, first: Int32, end: Int32, tile: Int32, tile_count: Int32
):
    if warp == 0:
        _send(slots, full, empty, expert, first, end, tile, tile_count)
    else:
        expert, first, end, tile = _receive(slots, full, empty, tile_count)
    return expert, first, end, tile


@cute.jit
def _receive(slots: cute.Tensor, full, empty, tile_count: Int32):
    stage = tile_count % SCHEDULER_STAGES
    cute.arch.mbarrier_wait(full + stage, tile_count // SCHEDULER_STAGES & 1)
    work_tile = [cute.arch.make_warp_uniform(slots[i, stage]) for i in range(4)]
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + stage)
    return work_tile
