"""Kernels over sorted rows whose epilogue runs beside the next tile's product: up, down_backward, wide products.

The consumers put a tile of the product into shared memory in the tensors' dtype, beside it what that loses of a value
that is computed with (residual.py), and go on to the next. The first
warpgroup is `gather_warps` producer warps and finishing warps; these read the tile by rows, 16 bytes a thread.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .configs import Tile
from .core import (
    CHUNK,
    CONSUMER_WARPS,
    HALF,
    PIECE,
    enter,
    partition,
    piece_layout,
    ragged_pieces,
    shared_chunk,
    storage,
)
from .multiply import consumer_fragments, multiply_tile, narrow_fragment
from .residual import PIECE_BYTES, Residual
from .rows import RowsKernel, add_bias, table_and_counter

LANE_ROWS = 32 * CHUNK // PIECE  # rows of a piece that a warp reads at a time
HALF_BYTES = HALF * PIECE * 2


class FinishedKernel(RowsKernel):
    """down_backward's finishing warps have a part of their own. The kernel's own barriers are `handed_over` of both
    halves of the tile (by the consumers' warps) and `taken` of both (by the finishing warps)."""

    registers = 136, 184  # of the first warpgroup and of the consumers: 3 * 168 in all
    truncated = False  # how the product is handed over, see residual.py

    def __init__(self, dtype, tile: Tile, gather: bool = True, gated: bool = False):
        super().__init__(dtype, tile, gather, gated)
        self.finishers = 4 - self.gather_warps

    def set_up_finish(self, computed_with: bool = False):
        """computed_with: the finishing warps do more with the product than to store it."""
        self.layout = piece_layout(self.dtype, 2 * self.pieces)
        self.arrivals = (4, 4, self.finishers, self.finishers)
        self.has_residual = computed_with and self.dtype is cutlass.BFloat16
        spare = 2 * self.pieces * PIECE_BYTES * 8 // self.dtype.width if self.has_residual else 0
        self.Storage = storage(self.dtype, self.layout_a, self.layout_b, self.layout, self.stages, 4, spare)

    def residual_of(self, shared):
        """The residuals of the tile in shared memory, or None."""
        if not self.has_residual:
            return None
        return Residual(shared.pieces.iterator.toint() + 2 * self.pieces * HALF_BYTES, self.truncated)

    def read_product(self, into, shared, half, piece, row, chunk):
        """The chunk-th 8 values of a row of the tile, in fp32."""
        rounded = cute.make_rmem_tensor(CHUNK, self.dtype)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * CHUNK)
        first = shared.pieces.iterator.toint() + (half * self.pieces + piece) * HALF_BYTES
        cute.copy(copy, shared_chunk(self.dtype, first, row, chunk), rounded)
        residual = self.residual_of(shared)
        if residual is None:
            into.store(rounded.load().to(Float32))
        else:
            words = residual.read(half * self.pieces + piece, row, chunk)
            for v in range(CHUNK):
                into[v] = residual.value(rounded, words, v, chunk)

    @cute.jit
    def divide_work(
        self, atom_a, source: cute.Tensor, atom_w, tensor_w, token: cute.Tensor, table: cute.Tensor, last: Int32,
        tiled_mma, narrow_mma, bias, layout_a, layout_b, layout, of_finishers: cutlass.Constexpr,
    ):  # fmt: skip
        """Every warp's part; `of_finishers`: what the subclass's `finish_tiles` takes beside `shared` and the warp."""
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tiles, counter = table_and_counter(table, last)
        shared = enter(
            self.Storage, layout_a, layout_b, layout, self.stages, self.producer_arrivals(), self.arrivals, (atom_w,),
            counter, self.num_items(tiles), 4 + CONSUMER_WARPS, dealt=self.dealt,
        )  # fmt: skip
        if group == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp < self.gather_warps:
                self.produce(atom_a, source, atom_w, tensor_w, shared, token, tiles)
            else:
                self.finish_tiles(shared, warp - self.gather_warps, *of_finishers)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.multiply_tiles(tiled_mma, narrow_mma, shared, bias)

    @cute.jit
    def multiply_tiles(self, tiled_mma, narrow_mma, shared: cutlass.Constexpr, bias):
        """A consumer's part: its half of every tile of the product (+ bias), handed over in shared memory."""
        half = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        handed_over, taken = shared.own + half, shared.own + 2 + half
        fragment_a, fragment_b, accumulator = consumer_fragments(tiled_mma, shared, half, self.columns)
        narrow_b = narrow_fragment(narrow_mma, shared, self.last_columns)
        store, places = self.store_of(tiled_mma, shared, half)
        values, residual = store.retile(accumulator), self.residual_of(shared)
        stage, phase, taken_phase = Int32(0), Int32(0), Int32(1)
        expert, first, end, column_tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            # nothing to multiply where the half has no rows
            depth_tiles = Int32(first + HALF * half < end) * self.depth_tiles
            stage, phase = multiply_tile(
                tiled_mma, narrow_mma, (accumulator,), (fragment_a,), fragment_b, narrow_b, self.last_columns,
                column_tile == self.column_tiles - 1,
                (shared.ring, stage, phase, depth_tiles, self.depth_tiles - depth_tiles),
            )  # fmt: skip
            if const_expr(bias is not None):
                width, limit = self.columns // self.halves, bias.shape[1] // self.halves
                count = cute.size(values) // self.halves
                for side in cutlass.range_constexpr(self.halves):
                    column = column_tile * width + side * (limit - width)
                    add_bias(values, places, side * count, count, bias, expert, column, (side + 1) * limit)
            cute.arch.mbarrier_wait(taken, taken_phase)
            taken_phase ^= 1
            for p in cutlass.range_constexpr(self.pieces):
                store.write(p, lambda v, start=p * store.size: values[start + v], residual)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(handed_over)
            expert, first, end, column_tile = shared.work.receive(turn)
            turn += 1

    @cute.jit
    def finish_tiles(self, shared: cutlass.Constexpr, finisher, atom_out, tensor_out, a):
        """A finishing warp's part: the tile is sent by the first of them, a (of `up`) computed by all."""
        handed_over, taken = shared.own, shared.own + 2
        tile_phase = Int32(0)
        expert, top, end, column_tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            for half in cutlass.range_constexpr(2):
                first = top + HALF * half
                cute.arch.mbarrier_wait(handed_over + half, tile_phase)
                if const_expr(atom_out is not None):
                    if finisher == 0 and first < end:
                        self.send(shared.pieces, atom_out, tensor_out, first, end, column_tile, half)
                if const_expr(a is not None):
                    self.write_a(shared, a, first, end, column_tile, half, finisher)
                if const_expr(atom_out is not None):
                    if finisher == 0:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(taken + half)
            tile_phase ^= 1
            expert, top, end, column_tile = shared.work.receive(turn)
            turn += 1
        cute.arch.cp_async_bulk_wait_group(0)

    def send(self, pieces, atom_out, tensor_out, first, end, column_tile, half):
        """Issue the stores of half a tile; by one warp."""
        per_side = self.pieces // self.halves
        for p in range(self.pieces):
            side = () if self.halves == 1 else (p // per_side,)
            from_out, to_out = partition(atom_out, pieces, ragged_pieces(tensor_out, first, end, *side))
            box = column_tile * per_side + p % per_side
            cute.copy(atom_out, from_out[None, half * self.pieces + p], to_out[None, box])
        cute.arch.cp_async_bulk_commit_group()
