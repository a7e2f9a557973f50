"""Weight gradients: out[e] = sum over e's rows r of direct[r]^T gathered[token[r]] (varlen-K).

The rows are the depth of the product, so both operands are MN-major in shared memory. The direct side is read through a
TMA view of variable length and is zero past the expert's end. The gathered side repeats the expert's last row there. So
nothing of other experts, or of unwritten rows, gets in. An expert without rows gets zeros.
"""

import math
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .config import CONSUMER_WARPS, EPI_TILE_N, SLAB_BYTES, SLAB_COLUMNS, THREADS, TILE_K, VECTOR, WARPGROUP_M, Tile
from .gemm_common import (
    EpilogueStore,
    Layouts,
    MainloopPipeline,
    TmaStore,
    advance,
    epilogue_layout,
    epilogue_store,
    look_up_tokens,
    one_stage,
    operand_layout,
    partition,
    set_up_shared,
    storage,
    tiles_and_counter,
    tma_load,
    tma_store,
)
from .mainloop import (
    MainloopParams,
    Mma,
    columns_of_last_tile,
    consumer_fragments,
    consumer_mma,
    issue,
    multiply,
    multiply_tile,
    narrow_tile,
)
from .ptx import copy_async
from .tile_scheduler import NO_WORK, rasterize
from .varlen import expert_columns, varlen_columns

WGRAD_TILE_M = 256  # rows of a tile: a consumer computes two halves of 64 of its 128
PRODUCER_WARPS = 4
QUARTER = WGRAD_TILE_M // PRODUCER_WARPS  # loaded by each of the four producer warps
REGISTERS = (40, 232)  # of warpgroup 0 and of the consumers: 3 * 168 in all
# up to as many row tiles of an expert all pass over the columns together, so that they read these from L2
MAX_ROW_TILES_TOGETHER = 8
ROW_TILES_TOGETHER = 4  # row tiles that do so where an expert has more
ROWS_PER_PASS = 16  # rows that the producer warps copy at a time


@dataclass(frozen=True)
class HalfStore:
    """A consumer's store of half a tile, 64 rows, through epi tiles in shared memory to `out`."""

    store: EpilogueStore
    epi_tiles: cute.Tensor
    out: TmaStore


@dataclass(frozen=True)
class PendingStore:
    """The last tile's lower half, which is still to be stored.

    accumulator: its products. half_tile: its expert (-1: none), half, column tile, and whether there are rows.
    """

    accumulator: cute.Tensor
    half_store: HalfStore
    half_tile: tuple


@dataclass(frozen=True)
class HalvesParams:
    """Arguments of `multiply_halves` beside the operands; stage and phase are where it begins."""

    pipeline: MainloopPipeline
    stage: Int32
    phase: Int32
    k_blocks: Int32
    pending_store: PendingStore


class GemmWgradKernel:
    """GEMM of a weight gradient: direct [R, M], gathered [T, N] -> out [E, M, N], stored with N or with M contiguous.

    All four warps of warpgroup 0 produce: each loads a quarter of the direct side by TMA, and all of them copy
    gathered rows (full[s]: 1 + 128 arrivals). Consumers multiply and store; there are no extra barriers.

    A tile is as large as registers allow, because what is loaded for it comes from L2, whose bandwidth decides where
    experts have few rows. The gathered side is the narrow one: a copy of 16 bytes costs the producer as much as a TMA
    load of a box.
    """

    def __init__(self, dtype, tile: Tile):
        self.dtype = dtype
        self.columns, self.stages = tile.columns, tile.stages

    @cute.jit
    def __call__(
        self,
        gathered: cute.Tensor,
        direct: cute.Tensor,
        out: cute.Tensor,
        token: cute.Tensor,
        offsets: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        _, height, width = out.shape
        self.column_major = out.stride[1] == 1
        self.row_tiles, self.column_tiles = math.ceil(height / WGRAD_TILE_M), math.ceil(width / self.columns)
        self.last_columns, narrow_mma = columns_of_last_tile(width, self.columns), None
        if const_expr(self.last_columns):
            narrow_mma = consumer_mma(self.dtype, False, False, self.last_columns)
        layouts = Layouts(
            operand_layout(self.dtype, WGRAD_TILE_M, False, self.stages),
            operand_layout(self.dtype, self.columns, False, self.stages),
            epilogue_layout(self.dtype, 2 * (self.columns // EPI_TILE_N), self.column_major),
        )
        quarter = operand_layout(self.dtype, QUARTER, False, self.stages)
        atom, tensor = tma_load(varlen_columns(direct), one_stage(quarter), (QUARTER, TILE_K))
        target = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        stored = tma_store(target, one_stage(layouts.epilogue), (WARPGROUP_M, EPI_TILE_N))
        self.Storage = storage(self.dtype, layouts, self.stages, 0)
        mma = Mma(consumer_mma(self.dtype, False, False, self.columns), narrow_mma)
        self.kernel(atom, tensor, gathered, stored, token, offsets, tile_table, state_row, mma, layouts).launch(
            grid=(num_blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tensor: cute.Tensor,
        gathered: cute.Tensor,
        out: TmaStore,
        token: cute.Tensor,
        offsets: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: Mma,
        layouts: Layouts,
    ):
        warpgroup_index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        _, counter = tiles_and_counter(tile_table, state_row)
        num_work_tiles = (offsets.shape[0] - 1) * (self.row_tiles * self.column_tiles)
        shared = set_up_shared(
            self.Storage,
            layouts,
            self.stages,
            1 + 32 * PRODUCER_WARPS,
            {},
            (atom, out.atom),
            counter,
            num_work_tiles,
            PRODUCER_WARPS + CONSUMER_WARPS,
        )
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            self.produce(atom, tensor, gathered, shared, token, offsets)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.run_consumer(mma, shared, warpgroup_index - 1, out)
        shared.arrivals.check()

    @cute.jit
    def run_consumer(self, mma: cutlass.Constexpr, shared: cutlass.Constexpr, consumer, out: cutlass.Constexpr):
        """Run consumer 0 or 1: it computes its 128 rows of every tile.

        The lower half is stored after the first MMAs of the next tile's upper half: until then TMA reads what was
        stored of the upper half.
        """
        shared.arrivals.begin("consumers", CONSUMER_WARPS)
        (top_a, fragment_b, top), (bottom_a, _, bottom) = (
            consumer_fragments(mma.whole, shared, 2 * consumer + half, self.columns) for half in range(2)
        )
        narrow = narrow_tile(mma.narrow, shared, self.last_columns)
        thread = cute.arch.thread_idx()[0] % 128
        store = epilogue_store(
            mma.whole, shared.epilogue, self.dtype, thread, consumer, self.columns // EPI_TILE_N, self.column_major
        )
        half_store = HalfStore(store, shared.epilogue, out)
        stage, phase = Int32(0), Int32(0)
        pending = Int32(-1), Int32(0), Int32(0), Int32(0)  # PendingStore.half_tile
        expert, start, end, tile = shared.scheduler.receive(Int32(0))
        tile_count = Int32(1)
        while expert >= 0:
            row_tile, column_tile = self.tile_coordinates(tile)
            k_blocks, pending_store = (end - start + 15) // 16, PendingStore(bottom, half_store, pending)
            stage, phase = multiply_tile(
                mma.whole,
                (top, bottom),
                (top_a, bottom_a),
                fragment_b,
                narrow,
                column_tile == self.column_tiles - 1,
                HalvesParams(shared.pipeline, stage, phase, k_blocks, pending_store),
                mainloop=self.multiply_halves,
            )
            self.store_half(top, half_store, expert, 4 * row_tile + 2 * consumer, column_tile, start < end)
            pending = expert, 4 * row_tile + 2 * consumer + 1, column_tile, Int32(start < end)
            expert, start, end, tile = shared.scheduler.receive(tile_count)
            tile_count += 1
        self.store_pending(PendingStore(bottom, half_store, pending))
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def multiply_halves(self, tiled_mma, accumulators, fragments_a, fragment_b, params: cutlass.Constexpr):
        """Compute both halves' products of `k_blocks` k blocks of 16 rows. Between the upper and the lower half of the
        first stage, the lower half of the tile before is stored."""
        pipeline, stage, phase, k_blocks = params.pipeline, params.stage, params.phase, params.k_blocks
        in_stage = cute.size(fragment_b, mode=[2])
        first = cutlass.min(k_blocks, in_stage)
        pending = stage, k_blocks > 0
        if k_blocks > 0:
            pipeline.wait_full(stage, phase)
        for half in cutlass.range_constexpr(2):
            warpgroup.fence()
            for k_block in cutlass.range(first, unroll=1):
                # were the accumulators filled with zeros, the compiler would wait for the other half's products
                tiled_mma.set(warpgroup.Field.ACCUMULATE, k_block > 0)
                issue(
                    tiled_mma, accumulators[half : half + 1], fragments_a[half : half + 1], fragment_b, k_block, stage
                )
            warpgroup.commit_group()
            if const_expr(half == 0):
                warpgroup.wait_group(1)
                self.store_pending(params.pending_store)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        if k_blocks > 0:
            stage, phase = advance(stage, phase, pipeline.stages)
        left = k_blocks - first
        params = MainloopParams(
            pipeline, stage, phase, left // in_stage, tail_k_blocks=left % in_stage, pending=pending
        )
        return multiply(tiled_mma, accumulators, fragments_a, fragment_b, params)

    @cute.jit
    def store_pending(self, pending: cutlass.Constexpr):
        expert, half, column_tile, has_rows = pending.half_tile
        if expert >= 0:
            self.store_half(pending.accumulator, pending.half_store, expert, half, column_tile, has_rows > 0)

    @cute.jit
    def store_half(
        self,
        accumulator: cute.Tensor,
        half_store: cutlass.Constexpr,
        expert: Int32,
        half: Int32,
        column_tile: Int32,
        has_rows,
    ):
        """Store 64 rows of a tile's columns, the `half`-th, except what is past the last row or column; zeros where the
        expert has no rows."""
        store = half_store.store
        values = store.retile(accumulator)
        boxes = cute.local_tile(half_store.out.tensor[None, None, expert], (WARPGROUP_M, EPI_TILE_N), (half, None))
        from_out, to_out = partition(half_store.out.atom, half_store.epi_tiles, boxes)
        store.wait()
        for i in cutlass.range_constexpr(self.columns // EPI_TILE_N):
            if has_rows:
                store.write(i, lambda v, start=i * store.size: values[start + v])
            else:
                store.write(i, lambda v: Float32(0.0))
        store.publish()
        if store.is_storing_warp:
            for i in cutlass.range_constexpr(self.columns // EPI_TILE_N):
                box = column_tile * (self.columns // EPI_TILE_N) + i
                cute.copy(half_store.out.atom, from_out[None, store.stage(i)], to_out[None, box])
            cute.arch.cp_async_bulk_commit_group()

    def tile_coordinates(self, tile):
        """Compute (row, column) of an expert's tile."""
        if self.row_tiles <= MAX_ROW_TILES_TOGETHER:
            return tile % self.row_tiles, tile // self.row_tiles
        return rasterize(tile, self.row_tiles, self.column_tiles, ROW_TILES_TOGETHER)

    @cute.jit
    def find_work_tile(self, offsets: cute.Tensor, index: Int32):
        """Find the work tile of an index, which may be -1; an expert's tiles follow one another. Returns a WorkTile's
        fields."""
        expert, start, end, tile = NO_WORK
        if index >= 0:
            per_expert = self.row_tiles * self.column_tiles
            expert, tile = index // per_expert, index % per_expert
            start, end = offsets[expert], offsets[expert + 1]
        return expert, start, end, tile

    @cute.jit
    def produce(
        self,
        atom,
        tensor,
        gathered: cute.Tensor,
        shared: cutlass.Constexpr,
        token: cute.Tensor,
        expert_offsets: cute.Tensor,
    ):
        """Run the producer warps: load the direct side by TMA, the other by 16-byte copies of token[r]'s columns.

        As in varlen_m.py the next work tile is found while stages of this one are waited for. A stage's tokens are looked
        up a stage earlier. A work tile without rows has no stages and takes one step.
        """
        thread = cute.arch.thread_idx()[0]
        scheduler, full, empty = shared.scheduler, shared.pipeline.full, shared.pipeline.empty
        shared.arrivals.begin("producer", PRODUCER_WARPS)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        vector, row_in_pass = thread % 8, thread // 8
        passes, slabs = TILE_K // ROWS_PER_PASS, self.columns // SLAB_COLUMNS
        target = shared.b.iterator.toint() + row_in_pass * 128 + (vector ^ row_in_pass % 8) * 16
        width = gathered.shape[1]
        tokens, offsets = cute.make_rmem_tensor(passes, Int32), cute.make_rmem_tensor(passes, Uint32)
        index = scheduler.initial_index()
        expert, start, end, tile = self.find_work_tile(expert_offsets, index)
        scheduler.share(warp, (expert, start, end, tile), Int32(0))
        look_up_tokens(tokens, token, start + row_in_pass, end, ROWS_PER_PASS)
        stage, phase, tile_count = Int32(0), Int32(1), Int32(1)
        while expert >= 0:
            if warp == 0:
                index = scheduler.prefetch_dynamic()
            next_expert, next_start, next_end, next_tile = NO_WORK
            row_tile, column_tile = self.tile_coordinates(tile)
            first = column_tile * self.columns + vector * VECTOR
            expert_rows = expert_columns(tensor, start, end)
            boxes = cute.local_tile(expert_rows, (QUARTER, TILE_K), (4 * row_tile + warp, None))
            quarter = cute.local_tile(shared.a, (QUARTER, TILE_K), (warp, 0, None))
            to_direct, from_direct = partition(atom, quarter, boxes)
            steps = cutlass.max((end - start + TILE_K - 1) // TILE_K, 1)
            for k_tile in cutlass.range(steps, unroll=1):
                if warp == 0:
                    if k_tile == steps // 2:
                        next_index = scheduler.broadcast(index)
                        next_expert, next_start, next_end, next_tile = self.find_work_tile(expert_offsets, next_index)
                for i in cutlass.range_constexpr(passes):
                    offsets[i] = (tokens[i] * width).to(Uint32) * 2
                if k_tile < steps - 1:
                    look_up_tokens(tokens, token, start + (k_tile + 1) * TILE_K + row_in_pass, end, ROWS_PER_PASS)
                else:
                    next_work_tile = next_expert, next_start, next_end, next_tile
                    next_expert, next_start, next_end, next_tile = scheduler.share(warp, next_work_tile, tile_count)
                    tile_count += 1
                    look_up_tokens(tokens, token, next_start + row_in_pass, next_end, ROWS_PER_PASS)
                if start < end:
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    if warp == 0:
                        shared.pipeline.announce(stage, WGRAD_TILE_M * TILE_K * 2)
                    cute.copy(atom, from_direct[None, k_tile], to_direct[None, stage], tma_bar_ptr=full + stage)
                    for slab in cutlass.range_constexpr(slabs):
                        # columns past the last are read twice instead, and clipped when stored
                        column = cutlass.min(first + slab * SLAB_COLUMNS, width - VECTOR)
                        source = gathered.iterator.toint() + Int64(column * 2)
                        for i in cutlass.range_constexpr(passes):
                            copy_async(
                                target + stage * (slabs * SLAB_BYTES) + slab * SLAB_BYTES + i * (ROWS_PER_PASS * 128),
                                source + offsets[i].to(Int64),
                            )
                    shared.pipeline.arrive_when_copied(stage)
                    stage, phase = advance(stage, phase, self.stages)
            expert, start, end, tile = next_expert, next_start, next_end, next_tile
