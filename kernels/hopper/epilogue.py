"""Kernels over sorted rows with epilogue warps, which work on a tile while the consumers multiply the next one.

The consumers put a tile of the product into shared memory in the tensors' dtype. Where the epilogue warps compute with
it, what that rounding loses lies beside it (rounding_error.py). They read the tile by rows, 16 bytes a thread.

    barrier          arrivals               signalled by                    waited for by
    tile_full[h]     4                      consumer h's warps, written     the epilogue warps
    tile_empty[h]    all epilogue warps     each epilogue warp, read        consumer h, before it writes again

h: the half of the tile, 64 rows, and the consumer that computes it. Of warpgroup 0 the first `gather_warps` warps are
producers, the others epilogue warps.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .config import CONSUMER_WARPS, EPI_TILE_N, VECTOR, WARPGROUP_M, Tile
from .gemm_common import Layouts, epilogue_layout, partition, set_up_shared, shared_vector, storage, tiles_and_counter
from .mainloop import consumer_fragments, multiply_tile, narrow_tile
from .rounding_error import RESIDUAL_BYTES, Residual
from .varlen import varlen_epi_tiles
from .varlen_m import VarlenMKernel, add_bias, lora_atoms

WARP_ROWS = 32 * VECTOR // EPI_TILE_N  # rows of an epi tile that a warp reads at a time
EPI_TILE_BYTES = WARPGROUP_M * EPI_TILE_N * 2


class EpilogueWarpsKernel(VarlenMKernel):
    """Cooperative consumers, and epilogue warps that store the tile and may compute with it.

    Subclasses override `epilogue_half_tile`, or `run_epilogue_warp` as a whole.
    """

    registers = 136, 184  # of warpgroup 0 and of the consumers: 3 * 168 in all
    truncated = False  # how the product goes to the epilogue warps, see rounding_error.py

    def __init__(self, dtype, tile: Tile, gather: bool = True, gate_then_up: bool = False):
        super().__init__(dtype, tile, gather, gate_then_up)
        self.num_epilogue_warps = 4 - self.gather_warps

    def set_up_epilogue(self, computed_with: bool = False):
        """Lay out shared memory; computed_with: the epilogue warps compute with the product, and need its residuals in
        bf16."""
        self.layouts = Layouts(self.layout_a, self.layout_b, epilogue_layout(self.dtype, 2 * self.epi_tiles))
        self.extra_arrivals = {"tile_full": CONSUMER_WARPS // 2, "tile_empty": self.num_epilogue_warps}
        self.has_residual = computed_with and self.dtype is cutlass.BFloat16
        spare = 2 * self.epi_tiles * RESIDUAL_BYTES * 8 // self.dtype.width if self.has_residual else 0
        self.Storage = storage(self.dtype, self.layouts, self.stages, 4, spare)

    def residual_of(self, shared):
        """Locate the residuals of the tile in shared memory; None without any."""
        if not self.has_residual:
            return None
        return Residual(shared.epilogue.iterator.toint() + 2 * self.epi_tiles * EPI_TILE_BYTES, self.truncated)

    def read_product(self, into, shared, half, epi_tile, row, vector):
        """Read the 8 values number `vector` of a row of an epi tile, in fp32."""
        rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        first = shared.epilogue.iterator.toint() + (half * self.epi_tiles + epi_tile) * EPI_TILE_BYTES
        cute.copy(copy, shared_vector(self.dtype, first, row, vector), rounded)
        residual = self.residual_of(shared)
        if residual is None:
            into.store(rounded.load().to(Float32))
        else:
            words = residual.read(half * self.epi_tiles + epi_tile, row, vector)
            for v in range(VECTOR):
                into[v] = residual.value(rounded, words, v, vector)

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
        """Run every warp's role; `epilogue_arguments`: what `run_epilogue_warp` takes beside `shared` and the warp."""
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tiles, counter = tiles_and_counter(tile_table, state_row)
        shared = set_up_shared(
            self.Storage,
            layouts,
            self.stages,
            self.producer_arrivals(),
            self.extra_arrivals,
            (operands.atom_b, *lora_atoms(lora)),
            counter,
            self.num_work_tiles(tiles),
            4 + CONSUMER_WARPS + self.decoding_warps,
            static=self.static,
        )
        if warpgroup == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp < self.gather_warps:
                self.produce(operands, lora, shared, token, tiles)
            else:
                self.run_epilogue_warp(shared, warp - self.gather_warps, *epilogue_arguments)
        else:
            self.run_behind_producers(warpgroup, operands, shared, mma, bias)
        shared.arrivals.check()

    @cute.jit
    def run_behind_producers(
        self, warpgroup, operands: cutlass.Constexpr, shared: cutlass.Constexpr, mma: cutlass.Constexpr, bias
    ):
        """Run the warps of warpgroups 1 and 2, the consumers."""
        cute.arch.setmaxregister_increase(self.registers[1])
        self.run_consumer(mma, shared, bias)

    @cute.jit
    def run_consumer(self, mma: cutlass.Constexpr, shared: cutlass.Constexpr, bias):
        """Run a consumer: write its half of every tile of the product (+ bias) into shared memory."""
        shared.arrivals.begin("consumers", CONSUMER_WARPS)
        half = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        tile_full, tile_empty = shared.extra_barriers + half, shared.extra_barriers + 2 + half
        fragment_a, fragment_b, accumulator = consumer_fragments(mma.whole, shared, half, self.columns)
        narrow = narrow_tile(mma.narrow, shared, self.last_columns)
        store, coordinates = self.store_of(mma.whole, shared, half)
        values, residual = store.retile(accumulator), self.residual_of(shared)
        stage, phase, empty_phase = Int32(0), Int32(0), Int32(1)
        expert, first, end, column_tile = shared.scheduler.receive(Int32(0))
        tile_count = Int32(1)
        while expert >= 0:
            has_rows = Int32(first + WARPGROUP_M * half < end)
            stage, phase = multiply_tile(
                mma.whole,
                (accumulator,),
                (fragment_a,),
                fragment_b,
                narrow,
                column_tile == self.column_tiles - 1,
                self.half_tile_params(shared.pipeline, stage, phase, has_rows),
            )
            if const_expr(bias is not None):
                width, limit = self.columns // self.weight_sides, bias.shape[1] // self.weight_sides
                count = cute.size(values) // self.weight_sides
                for side in cutlass.range_constexpr(self.weight_sides):
                    column = column_tile * width + side * (limit - width)
                    add_bias(values, coordinates, side * count, count, bias, expert, column, (side + 1) * limit)
            cute.arch.mbarrier_wait(tile_empty, empty_phase)
            empty_phase ^= 1
            for i in cutlass.range_constexpr(self.epi_tiles):
                store.write(i, lambda v, start=i * store.size: values[start + v], residual)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            shared.arrivals.arrive("tile_full", tile_full, groups=2)
            expert, first, end, column_tile = shared.scheduler.receive(tile_count)
            tile_count += 1

    @cute.jit
    def run_epilogue_warp(self, shared: cutlass.Constexpr, epilogue_warp, out: cutlass.Constexpr, computed):
        """Run an epilogue warp: the first one stores the tile by TMA, all of them fill the tensor `computed`."""
        shared.arrivals.begin("epilogue", self.num_epilogue_warps)
        tile_full, tile_empty = shared.extra_barriers, shared.extra_barriers + 2
        tile_phase = Int32(0)
        expert, top, end, column_tile = shared.scheduler.receive(Int32(0))
        tile_count = Int32(1)
        while expert >= 0:
            for half in cutlass.range_constexpr(2):
                first = top + WARPGROUP_M * half
                cute.arch.mbarrier_wait(tile_full + half, tile_phase)
                if const_expr(out is not None):
                    if epilogue_warp == 0 and first < end:
                        self.store_half_tile(shared.epilogue, out, first, end, column_tile, half)
                if const_expr(computed is not None):
                    self.epilogue_half_tile(shared, computed, first, end, column_tile, half, epilogue_warp)
                if const_expr(out is not None):
                    if epilogue_warp == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                shared.arrivals.arrive("tile_empty", tile_empty, half)
            tile_phase ^= 1
            expert, top, end, column_tile = shared.scheduler.receive(tile_count)
            tile_count += 1
        cute.arch.cp_async_bulk_wait_group(0)

    def epilogue_half_tile(self, shared, computed, first, end, column_tile, half, epilogue_warp):
        """Compute an epilogue warp's part of half a tile, in kernels that compute with the product."""
        raise NotImplementedError(f"{type(self).__name__} computes nothing from the product")

    def store_half_tile(self, epi_tiles, out, first, end, column_tile, half):
        """Issue the TMA stores of half a tile; by one warp."""
        per_side = self.epi_tiles // self.weight_sides
        for i in range(self.epi_tiles):
            side = () if self.weight_sides == 1 else (i // per_side,)
            from_out, to_out = partition(out.atom, epi_tiles, varlen_epi_tiles(out.tensor, first, end, *side))
            box = column_tile * per_side + i % per_side
            cute.copy(out.atom, from_out[None, half * self.epi_tiles + i], to_out[None, box])
        cute.arch.cp_async_bulk_commit_group()
