"""down_backward: one pass over dout gives da', and an epilogue beside it reads h once and writes dh, a' and dw.

    da' = dout W2,  dh = w da' act'(h),  a' = w act(h),  dw = <da', act(h)>      (paper, section 3)

The finishing warps read da' from shared memory and h from global memory, a group of rows ahead of its use.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .activations import activate
from .configs import Tile
from .core import CHUNK, HALF, PIECE, THREADS, global_chunk
from .finish import LANE_ROWS, FinishedKernel


class DownBackwardKernel(FinishedKernel):
    """dout [T, H] gathered, weight [E, I, H] (a view of down), h [R, 2I] in the order of gate_up."""

    truncated = True  # da' is not stored

    def __init__(self, dtype, tile: Tile, activation, interleaved: bool):
        super().__init__(dtype, tile)
        self.activation = activation
        self.interleaved = interleaved

    @cute.jit
    def __call__(
        self, dout: cute.Tensor, weight: cute.Tensor, h: cute.Tensor, routing_weight: cute.Tensor, dh, a, parts,
        pair: cute.Tensor, token: cute.Tensor, table: cute.Tensor, last: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        _, tensor_dout, atom_w, tensor_w = self.set_up(dout, weight)
        self.set_up_finish(computed_with=True)
        self.kernel(
            tensor_dout, atom_w, tensor_w, h, routing_weight, dh, a, parts, pair, token, table, last,
            self.tiled_mma, self.narrow_mma, self.layout_a, self.layout_b, self.layout,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensor_dout: cute.Tensor, atom_w: cute.CopyAtom, tensor_w: cute.Tensor, h: cute.Tensor,
        routing_weight: cute.Tensor, dh, a, parts, pair: cute.Tensor, token: cute.Tensor, table: cute.Tensor,
        last: Int32, tiled_mma: cute.TiledMma, narrow_mma, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
        layout: cute.ComposedLayout,
    ):  # fmt: skip
        self.divide_work(
            None, tensor_dout, atom_w, tensor_w, token, table, last, tiled_mma, narrow_mma, None, layout_a, layout_b,
            layout, (h, routing_weight, dh, a, parts, pair),
        )  # fmt: skip

    @cute.jit
    def finish_tiles(
        self, shared: cutlass.Constexpr, finisher, h: cute.Tensor, routing_weight: cute.Tensor, dh, a, parts,
        pair: cute.Tensor,
    ):  # fmt: skip
        """A finishing warp's part: every third group of LANE_ROWS rows, over all the tile's columns."""
        handed_over, taken = shared.own, shared.own + 2
        lane = cute.arch.lane_idx()
        lane_row = lane // (PIECE // CHUNK)
        now = cute.make_rmem_tensor((CHUNK, 2, self.pieces), self.dtype)  # h of a group of rows
        ahead = cute.make_rmem_tensor((CHUNK, 2, self.pieces), self.dtype)
        tile_phase, own_group = Int32(0), Int32(finisher)
        expert, top, end, column_tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            for half in cutlass.range_constexpr(2):
                first = top + HALF * half
                groups = (cutlass.max(cutlass.min(end - first, HALF), 0) + LANE_ROWS - 1) // LANE_ROWS
                row = first + own_group * LANE_ROWS + lane_row
                routed = self.load(now, h, routing_weight, pair, row, end, column_tile)
                cute.arch.mbarrier_wait(handed_over + half, tile_phase)
                for group in cutlass.range(own_group, groups, self.finishers, unroll=1):
                    row = first + group * LANE_ROWS + lane_row
                    routed_ahead = self.load(
                        ahead, h, routing_weight, pair, row + self.finishers * LANE_ROWS, end, column_tile
                    )
                    self.finish_group(
                        shared, half, now, routed, dh, a, parts, row, row - first, end,
                        column_tile, h.shape[1] // 2,
                    )  # fmt: skip
                    routed = routed_ahead
                    for v in cutlass.range_constexpr(cute.size(now)):
                        now[v] = ahead[v]
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(taken + half)
                # who is next in turn goes first
                own_group = (own_group + self.finishers - HALF // LANE_ROWS % self.finishers) % self.finishers
            tile_phase ^= 1
            expert, top, end, column_tile = shared.work.receive(turn)
            turn += 1

    @cute.jit
    def load(
        self, into, h: cute.Tensor, routing_weight: cute.Tensor, pair: cute.Tensor, row: Int32, end: Int32,
        column_tile: Int32,
    ):  # fmt: skip
        """This thread's chunks of h in a row, up to row `end`; returns the row's routing weight."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * CHUNK)
        inner = h.shape[1] // 2
        weight = Float32(0.0)
        if const_expr(inner % self.columns):
            into.fill(0.0)  # act of what lies past the last column must be finite
        if row < end:
            weight = routing_weight[pair[row]]
            for p in cutlass.range_constexpr(self.pieces):
                column = self.column_of(column_tile, p)
                if column < inner:
                    for side in cutlass.range_constexpr(2):
                        cute.copy(copy, self.chunk_of_h(h, row, column, side), into[None, side, p])
        return weight

    def column_of(self, column_tile, p):
        """The first column of this thread's chunk of da in the p-th piece of a tile."""
        return (column_tile * self.pieces + p) * PIECE + cute.arch.lane_idx() % (PIECE // CHUNK) * CHUNK

    def chunk_of_h(self, h, row, column, side):
        """The gate or the up chunk of h at a column of da; interleaved, the first or second half of both."""
        width = h.shape[1]
        of_side = 2 * column + CHUNK * side if self.interleaved else column + width // 2 * side
        return global_chunk(h, Int64(row) * width + of_side)

    @cute.jit
    def finish_group(
        self, shared: cutlass.Constexpr, half: cutlass.Constexpr, of_h, routed: Float32, dh, a, parts, row: Int32,
        row_of_half: Int32, end: Int32, column_tile: Int32, width: cutlass.Constexpr,
    ):  # fmt: skip
        """dh, a' and dw of one row a thread, a piece of da's columns (`width` in all) at a time."""
        lane = cute.arch.lane_idx()
        da, of_a = cute.make_rmem_tensor(CHUNK, Float32), cute.make_rmem_tensor(CHUNK, self.dtype)
        partial = Float32(0.0)
        for p in cutlass.range_constexpr(self.pieces):
            column = self.column_of(column_tile, p)
            if const_expr(width % self.columns):
                da.fill(0.0)  # past a narrower last tile lies what was there before
                if column < width:
                    self.read_product(da, shared, half, p, row_of_half, lane % (PIECE // CHUNK))
            else:
                self.read_product(da, shared, half, p, row_of_half, lane % (PIECE // CHUNK))
            for v in cutlass.range_constexpr(CHUNK):
                gate, up = (2 * v, 2 * v + 1) if self.interleaved else (v, CHUNK + v)
                gate, up = (i + 2 * CHUNK * p for i in (gate, up))
                act, dgate, dup = activate(
                    of_h[gate].to(Float32), of_h[up].to(Float32), *self.activation, routed * da[v]
                )
                partial += da[v] * act
                of_h[gate], of_h[up] = dgate.to(self.dtype), dup.to(self.dtype)
                of_a[v] = (routed * act).to(self.dtype)
            if row < end:
                self.write(dh, a, of_h, of_a, row, column, p)
        if const_expr(parts is not None):
            for distance in (1, 2, 4):
                partial += cute.arch.shuffle_sync_bfly(partial, distance)
            if lane % (PIECE // CHUNK) == 0 and row < end:
                parts[column_tile, row] = partial

    @cute.jit
    def write(self, dh, a, of_dh, of_a, row: Int32, column: Int32, p: cutlass.Constexpr):
        """A chunk of a' and two of dh, unless they are past the last column."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * CHUNK)
        if const_expr(dh is not None):
            if column < dh.shape[1] // 2:
                for side in cutlass.range_constexpr(2):
                    cute.copy(copy, of_dh[None, side, p], self.chunk_of_h(dh, row, column, side))
        if const_expr(a is not None):
            if column < a.shape[1]:
                cute.copy(copy, of_a, global_chunk(a, Int64(row) * a.shape[1] + column))
