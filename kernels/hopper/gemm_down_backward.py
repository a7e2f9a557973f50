"""down_backward: da' = dout W2 by gathered rows; its epilogue warps read h once and write dh, a' and dw.

da' = dout W2,  dh = w da' act'(h),  a' = w act(h),  dw = <da', act(h)>      (paper, section 3)
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .activations import activate, activate_ungated
from .config import EPI_TILE_N, VECTOR, WARPGROUP_M, Tile
from .epilogue import WARP_ROWS, EpilogueWarpsKernel
from .gemm_common import Layouts, Operands, global_vector
from .mainloop import Mma


@dataclass(frozen=True)
class RowTensors:
    """Tensors that the epilogue warps read for every row: h [R, 2I], routing_weight [P], pair [R]; and those that they
    write, or None: dh [R, 2I], a [R, I], partials [column tiles, R], summed to dw."""

    h: cute.Tensor
    routing_weight: cute.Tensor
    dh: cute.Tensor | None
    a: cute.Tensor | None
    partials: cute.Tensor | None
    pair: cute.Tensor


class GemmDownBackwardKernel(EpilogueWarpsKernel):
    """GEMM of da' and its epilogue: dout [T, H] gathered, weight [E, I, H] (a view of down), h [R, 2I] in the order of
    gate_up; [R, I] where the activation has no gate.

    Warpgroup 0: warp 0 produces, warps 1 to 3 are epilogue warps. These read da' from shared memory, and h from global
    memory a group of rows before it is used.
    """

    truncated = True  # da' is not stored

    def __init__(self, dtype, tile: Tile, activation, interleaved: bool):
        super().__init__(dtype, tile)
        self.activation = activation
        self.interleaved = interleaved and activation.is_gated
        self.sides = activation.width(1)  # columns of h for one of da: 2, or 1 without a gate

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        weight: cute.Tensor,
        shrunk,
        factor,
        h: cute.Tensor,
        routing_weight: cute.Tensor,
        dh,
        a,
        partials,
        pair: cute.Tensor,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        operands = self.set_up_operands(dout, weight)
        lora = self.set_up_lora(shrunk, factor)
        self.set_up_epilogue(computed_with=True)
        tensors = RowTensors(h, routing_weight, dh, a, partials, pair)
        self.kernel(operands, lora, tensors, token, tile_table, state_row, self.mma, self.layouts).launch(
            grid=(num_blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        lora,
        tensors: RowTensors,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: Mma,
        layouts: Layouts,
    ):
        self.run_warps(operands, lora, token, tile_table, state_row, mma, None, layouts, (tensors,))

    @cute.jit
    def run_epilogue_warp(self, shared: cutlass.Constexpr, epilogue_warp, tensors: cutlass.Constexpr):
        """Run an epilogue warp: it computes every third group of WARP_ROWS rows, over all the tile's columns."""
        shared.arrivals.begin("epilogue", self.num_epilogue_warps)
        tile_full, tile_empty = shared.extra_barriers, shared.extra_barriers + 2
        lane = cute.arch.lane_idx()
        lane_row = lane // (EPI_TILE_N // VECTOR)
        h_now = cute.make_rmem_tensor((VECTOR, self.sides, self.epi_tiles), self.dtype)  # h of a group of rows
        h_next = cute.make_rmem_tensor((VECTOR, self.sides, self.epi_tiles), self.dtype)
        tile_phase, own_group = Int32(0), Int32(epilogue_warp)
        expert, top, end, column_tile = shared.scheduler.receive(Int32(0))
        tile_count = Int32(1)
        while expert >= 0:
            for half in cutlass.range_constexpr(2):
                first = top + WARPGROUP_M * half
                groups = (cutlass.max(cutlass.min(end - first, WARPGROUP_M), 0) + WARP_ROWS - 1) // WARP_ROWS
                row = first + own_group * WARP_ROWS + lane_row
                routed = self.load(h_now, tensors, row, end, column_tile)
                cute.arch.mbarrier_wait(tile_full + half, tile_phase)
                for group in cutlass.range(own_group, groups, self.num_epilogue_warps, unroll=1):
                    row = first + group * WARP_ROWS + lane_row
                    next_row = row + self.num_epilogue_warps * WARP_ROWS
                    routed_next = self.load(h_next, tensors, next_row, end, column_tile)
                    self.epilogue_rows(shared, half, h_now, routed, tensors, row, row - first, end, column_tile)
                    routed = routed_next
                    for v in cutlass.range_constexpr(cute.size(h_now)):
                        h_now[v] = h_next[v]
                cute.arch.sync_warp()
                shared.arrivals.arrive("tile_empty", tile_empty, half)
                # the warp after the one that took the last group takes the first group of the next half
                warps = self.num_epilogue_warps
                own_group = (own_group + warps - WARPGROUP_M // WARP_ROWS % warps) % warps
            tile_phase ^= 1
            expert, top, end, column_tile = shared.scheduler.receive(tile_count)
            tile_count += 1

    @cute.jit
    def load(self, into, tensors: cutlass.Constexpr, row: Int32, end: Int32, column_tile: Int32):
        """Load a thread's vectors of h of a row, nothing past row `end`. Returns the row's routing weight."""
        h, routing_weight, pair = tensors.h, tensors.routing_weight, tensors.pair
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        inner = h.shape[1] // self.sides
        weight = Float32(0.0)
        if const_expr(inner % self.columns):
            into.fill(0.0)  # act of what lies past the last column must be finite
        if row < end:
            weight = routing_weight[pair[row]]
            for epi_tile in cutlass.range_constexpr(self.epi_tiles):
                column = self.first_column(column_tile, epi_tile)
                if column < inner:
                    for side in cutlass.range_constexpr(self.sides):
                        cute.copy(copy, self.vector_of_h(h, row, column, side), into[None, side, epi_tile])
        return weight

    def first_column(self, column_tile, epi_tile):
        """Compute the first column of this thread's vector of da in an epi tile."""
        first = (column_tile * self.epi_tiles + epi_tile) * EPI_TILE_N
        return first + cute.arch.lane_idx() % (EPI_TILE_N // VECTOR) * VECTOR

    def vector_of_h(self, h, row, column, side):
        """View a vector of h at a column of da. side: 0 the gate's, 1 up's; interleaved, the first or second half of
        both; without a gate 0, the one there is."""
        width = h.shape[1]
        side_column = 2 * column + VECTOR * side if self.interleaved else column + width // 2 * side
        return global_vector(h, Int64(row) * width + side_column)

    def indices_of_column(self, v, epi_tile):
        """Compute where a thread's registers of h have the gate and the up of an epi tile's v-th column; without a gate,
        that column."""
        indices = (v,) if self.sides == 1 else (2 * v, 2 * v + 1) if self.interleaved else (v, VECTOR + v)
        return [i + self.sides * VECTOR * epi_tile for i in indices]

    def activate(self, h_values, da):
        """Compute act of gate and up, or of h, and their gradients."""
        if self.sides == 1:
            return activate_ungated(*h_values, self.activation.name, da)
        return activate(*h_values, *self.activation, da)

    @cute.jit
    def epilogue_rows(
        self,
        shared: cutlass.Constexpr,
        half: cutlass.Constexpr,
        h_values,
        routed: Float32,
        tensors: cutlass.Constexpr,
        row: Int32,
        row_in_half: Int32,
        end: Int32,
        column_tile: Int32,
    ):
        """Compute dh, a' and dw of one row a thread, an epi tile of da's columns at a time."""
        partials, width = tensors.partials, tensors.h.shape[1] // self.sides
        lane = cute.arch.lane_idx()
        da, a_values = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, self.dtype)
        partial = Float32(0.0)
        for epi_tile in cutlass.range_constexpr(self.epi_tiles):
            column = self.first_column(column_tile, epi_tile)
            if const_expr(width % self.columns):
                da.fill(0.0)  # past a narrower last tile lies what was there before
                if column < width:
                    self.read_product(da, shared, half, epi_tile, row_in_half, lane % (EPI_TILE_N // VECTOR))
            else:
                self.read_product(da, shared, half, epi_tile, row_in_half, lane % (EPI_TILE_N // VECTOR))
            for v in cutlass.range_constexpr(VECTOR):
                indices = self.indices_of_column(v, epi_tile)
                act, *dh_values = self.activate([h_values[i].to(Float32) for i in indices], routed * da[v])
                partial += da[v] * act
                for i, value in zip(indices, dh_values):
                    h_values[i] = value.to(self.dtype)
                a_values[v] = (routed * act).to(self.dtype)
            if row < end:
                self.write(tensors.dh, tensors.a, h_values, a_values, row, column, epi_tile)
        if const_expr(partials is not None):
            for distance in (1, 2, 4):
                partial += cute.arch.shuffle_sync_bfly(partial, distance)
            if lane % (EPI_TILE_N // VECTOR) == 0 and row < end:
                partials[column_tile, row] = partial

    @cute.jit
    def write(self, dh, a, dh_values, a_values, row: Int32, column: Int32, epi_tile: cutlass.Constexpr):
        """Store a vector of a' and two of dh, unless they are past the last column."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        if const_expr(dh is not None):
            if column < dh.shape[1] // self.sides:
                for side in cutlass.range_constexpr(self.sides):
                    cute.copy(copy, dh_values[None, side, epi_tile], self.vector_of_h(dh, row, column, side))
        if const_expr(a is not None):
            if column < a.shape[1]:
                cute.copy(copy, a_values, global_vector(a, Int64(row) * a.shape[1] + column))
