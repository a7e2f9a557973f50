"""down and up_backward_input: out[r] = source[r] @ weight[e]^T (+ bias[e]), rows sorted by expert."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .config import CONSUMER_WARPS, EPI_TILE_N, MAX_PINGPONG_COLUMNS, TILE_M, WARPGROUP_M, Tile
from .epilogue import EpilogueWarpsKernel
from .gemm_common import (
    EpilogueStore,
    Layouts,
    Operands,
    TmaStore,
    epilogue_layout,
    one_stage,
    partition,
    set_up_shared,
    storage,
    tiles_and_counter,
    tma_store,
)
from .mainloop import Mma, advance_by, consumer_fragments, multiply, multiply_tile, narrow_tile
from .varlen import varlen_epi_tiles, varlen_rows
from .varlen_m import VarlenMKernel, add_bias, lora_atoms


class CooperativeGemmDownKernel(EpilogueWarpsKernel):
    """GEMM of gemm_down with epilogue warps: source [R, K], weight [E, N, K], out [R, N]. Each consumer computes half of
    every tile, and the epilogue warps store it.

    It is for tiles of 256 columns, which load less per product than 192 do, and whose accumulators leave no registers for
    pingpong.
    """

    row_tiles_together = (
        2  # measured for the dynamic schedule: faster than 8 where experts have few rows, as fast where they have many
    )
    registers = 40, 232

    def __init__(self, dtype, tile: Tile):
        super().__init__(dtype, tile, gather=False)
        if tile.static:
            self.row_tiles_together = VarlenMKernel.row_tiles_together

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,
        weight: cute.Tensor,
        bias,
        shrunk,
        factor,
        out: cute.Tensor,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        operands = self.set_up_operands(source, weight)
        lora = self.set_up_lora(shrunk, factor)
        self.set_up_epilogue()
        stored = tma_store(varlen_rows(out), one_stage(self.layouts.epilogue), (WARPGROUP_M, EPI_TILE_N))
        self.kernel(operands, lora, stored, bias, token, tile_table, state_row, self.mma, self.layouts).launch(
            grid=(num_blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        lora,
        out: TmaStore,
        bias,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: Mma,
        layouts: Layouts,
    ):
        self.run_warps(operands, lora, token, tile_table, state_row, mma, bias, layouts, (out, None))


@dataclass(frozen=True)
class RowStore:
    """A pingpong consumer's store of 64 rows. coordinates: (row, column) of every value of its accumulator. epi_tiles: of
    all consumers, in shared memory."""

    store: EpilogueStore
    coordinates: cute.Tensor
    epi_tiles: cute.Tensor
    out: TmaStore
    bias: cute.Tensor | None


class PingpongGemmDownKernel(CooperativeGemmDownKernel):
    """GEMM of gemm_down without epilogue warps: each consumer computes all 128 rows of every other tile, and stores
    them while the other one multiplies.

    Two extra barriers, `order[c]`, make the consumers alternate:

        barrier    arrivals   signalled by                                     waited for by
        order[c]   4          consumer 1 - c's warps, when all stages of its   consumer c, before it begins a tile
                              tile have arrived

    Only then do the phases of the pipeline's barriers, which have one bit, tell the stages of its tile from earlier ones.
    Tall tiles have up to 192 rows: those past the 128th are computed by the other consumer, from the same stages, so
    that both release them (empty: 8 arrivals instead of 4).
    """

    registers = 24, 240  # the accumulators take 192 of a consumer's

    def __init__(self, dtype, tile: Tile):
        super().__init__(dtype, tile)
        self.epi_stages = (
            self.epi_tiles if self.rows == TILE_M else 2
        )  # of each consumer; tall tiles leave room for two
        if tile.columns > MAX_PINGPONG_COLUMNS:
            raise ValueError(
                f"pingpong tiles have at most {MAX_PINGPONG_COLUMNS} columns, not {tile.columns}: larger accumulators do "
                "not fit; use CooperativeGemmDownKernel"
            )
        if tile.static and self.rows > TILE_M:
            raise ValueError(f"tiles of {tile.rows} rows merge row tiles, which needs the dynamic scheduler")

    def set_up_lora(self, shrunk, factor):
        if shrunk is not None:
            self.registers = 40, 232  # the producer loads from two pairs of tensors; with 24 it spills
        return super().set_up_lora(shrunk, factor)

    def set_up_epilogue(self):
        self.layouts = Layouts(self.layout_a, self.layout_b, epilogue_layout(self.dtype, 2 * self.epi_stages))
        self.Storage = storage(self.dtype, self.layouts, self.stages, 2)

    @cute.jit
    def run_warps(
        self,
        operands: cutlass.Constexpr,
        lora: cutlass.Constexpr,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: cutlass.Constexpr,
        bias,
        layouts: cutlass.Constexpr,
        epilogue_arguments: cutlass.Constexpr,
    ):
        """Run every warp's role."""
        out, _ = epilogue_arguments
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warps = CONSUMER_WARPS // 2  # of one consumer
        tiles, counter = tiles_and_counter(tile_table, state_row)
        shared = set_up_shared(
            self.Storage,
            layouts,
            self.stages,
            self.producer_arrivals(),
            {"order": warps},
            (operands.atom_b, out.atom, *lora_atoms(lora)),
            counter,
            self.num_work_tiles(tiles),
            1 + CONSUMER_WARPS,
            consumer_warps=warps if self.rows == TILE_M else CONSUMER_WARPS,
            static=self.static,
        )
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(operands, lora, shared, token, tiles)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.run_pingpong_consumer(mma, shared, warpgroup - 1, out, bias)
        shared.arrivals.check()

    @cute.jit
    def run_pingpong_consumer(
        self, mma: cutlass.Constexpr, shared: cutlass.Constexpr, consumer, out: cutlass.Constexpr, bias
    ):
        """Run consumer 0 or 1: it computes every other tile."""
        shared.arrivals.begin("consumers", CONSUMER_WARPS, groups=2)
        (top_a, fragment_b, top), (bottom_a, _, bottom) = (
            consumer_fragments(mma.whole, shared, half, self.columns) for half in range(2)
        )
        narrow = narrow_tile(mma.narrow, shared, self.last_columns)
        store, coordinates = self.store_of(mma.whole, shared, consumer)
        row_store = RowStore(store, coordinates, shared.epilogue, out, bias)
        third_a = consumer_fragments(mma.whole, shared, 2, self.columns)[0] if self.rows > TILE_M else None
        own_order, other_order = shared.extra_barriers + consumer, shared.extra_barriers + 1 - consumer
        stage, phase = Int32(0), Int32(0)
        expert, first, end, column_tile = shared.scheduler.receive(Int32(0))
        tile_count = Int32(1)
        while expert >= 0:
            if (tile_count - 1) % 2 == consumer:
                cute.arch.mbarrier_wait(own_order, ((tile_count - 1) // 2 + 1 - consumer) % 2)
                is_last = column_tile == self.column_tiles - 1
                arrivals = ()
                if const_expr(self.rows > TILE_M):
                    arrivals = 2 - Int32(first + TILE_M < end), 2  # for the other consumer too
                params = self.tile_params(shared.pipeline, stage, phase, other_order, arrivals)
                if first + WARPGROUP_M < end:
                    stage, phase = multiply_tile(
                        mma.whole, (top, bottom), (top_a, bottom_a), fragment_b, narrow, is_last, params
                    )
                else:
                    stage, phase = multiply_tile(mma.whole, (top,), (top_a,), fragment_b, narrow, is_last, params)
                self.store_rows(top, row_store, expert, first, end, column_tile)
                if first + WARPGROUP_M < end:
                    self.store_rows(bottom, row_store, expert, first + WARPGROUP_M, end, column_tile)
            else:
                if const_expr(third_a is None):
                    stage, phase = advance_by(stage, phase, self.k_tiles + self.lora_k_tiles, self.stages)
                else:
                    if first + TILE_M < end:
                        params = self.tile_params(shared.pipeline, stage, phase)
                        stage, phase = multiply(mma.whole, (top,), (third_a,), fragment_b, params)
                        self.store_rows(top, row_store, expert, first + TILE_M, end, column_tile)
                    else:
                        stage, phase = advance_by(stage, phase, self.k_tiles + self.lora_k_tiles, self.stages)
            expert, first, end, column_tile = shared.scheduler.receive(tile_count)
            tile_count += 1
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def store_rows(
        self,
        accumulator: cute.Tensor,
        row_store: cutlass.Constexpr,
        expert: Int32,
        first: Int32,
        end: Int32,
        column_tile: Int32,
    ):
        """Store 64 rows of a tile (+ bias), except what is past row `end` or the last column."""
        store, bias = row_store.store, row_store.bias
        values = store.retile(accumulator)
        from_out, to_out = partition(
            row_store.out.atom, row_store.epi_tiles, varlen_epi_tiles(row_store.out.tensor, first, end)
        )
        for start in cutlass.range_constexpr(0, self.epi_tiles, self.epi_stages):
            epi_tiles = range(start, min(start + self.epi_stages, self.epi_tiles))
            store.wait()
            for i in epi_tiles:
                if const_expr(bias is not None):
                    column = column_tile * self.columns
                    add_bias(
                        values, row_store.coordinates, i * store.size, store.size, bias, expert, column, bias.shape[1]
                    )
                store.write(i - start, lambda v, start=i * store.size: values[start + v])
            store.publish()
            if store.is_storing_warp:
                for i in epi_tiles:
                    box = column_tile * self.epi_tiles + i
                    cute.copy(row_store.out.atom, from_out[None, store.stage(i - start)], to_out[None, box])
                cute.arch.cp_async_bulk_commit_group()
