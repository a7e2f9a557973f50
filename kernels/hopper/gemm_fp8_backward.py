"""down_backward with e4m3 operands: da' = dout W2 by gathered rows; its epilogue warps write dh in e4m3 too.

dh = w da' act'(h),  a' = w act(h),  dw = <da', act(h)>, as gemm_down_backward.py has it. wgmma wants e4m3 operands that
are contiguous along the depth, so that the weight is a transposed copy. What follows, dx = dh W1, is `GemmFp8DownKernel`
on the transposed copy of gate_up, whose depth is that of dh: 2I columns, gate's and up's groups counted apart.
"""

import math
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..scaled import SMALLEST_GRADIENT
from .activations import activate
from .config import THREADS, VECTOR, WARPGROUP_M
from .gemm_common import Layouts, Operands, global_vector
from .gemm_down_backward import RowTensors
from .gemm_fp8 import (
    BF16,
    GROUP,
    TILE,
    GroupMma,
    GroupScaledGatherKernel,
    GroupScales,
    QuantizedRows,
    quantize_group,
)

VECTORS = 2  # of VECTOR columns of a group, which a thread has: eight threads have the 128


@dataclass(frozen=True)
class BackwardTensors:
    """Tensors that the epilogue warps read and write, and those for dh in e4m3, or None: values [R, I'] in e4m3x2, the
    gate's half and then the up's, I' being I in whole groups; scales [R, I' / 64]."""

    rows: RowTensors
    scaled: QuantizedRows | None


class GemmFp8DownBackwardKernel(GroupScaledGatherKernel):
    """GEMM of da' and its epilogue: dout [T, H / 2] gathered, weight [E, I, H / 2] (of transposed down), both in
    e4m3x2; h [R, 2I] in bf16, gates first. da' is rounded to bf16, and so is dh before it is quantized.

    dw's partial sums are those of groups of 128 columns.
    """

    def __init__(self, activation, hidden: int):
        # One producer warp leaves three epilogue warps: faster by 3 to 6% at DeepSeek-V3's sizes, by 25% at Qwen3's. But
        # it spills where the last stage of a row is no whole group.
        self.gather_warps = 1 if hidden % GROUP == 0 else 2
        super().__init__(BF16, TILE)
        self.activation = activation

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        weight: cute.Tensor,
        dout_scales: cute.Tensor,
        weight_scales: cute.Tensor,
        shrunk,
        factor,
        h: cute.Tensor,
        routing_weight: cute.Tensor,
        dh,
        a,
        scaled_dh,
        dh_scales,
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
        self.set_up_epilogue()
        scales = GroupScales(dout_scales, weight_scales, token)
        scaled = None
        if const_expr(scaled_dh is not None):
            scaled = QuantizedRows(scaled_dh, dh_scales, None)
        written = BackwardTensors(RowTensors(h, routing_weight, dh, a, partials, pair), scaled)
        self.kernel(operands, lora, scales, written, token, tile_table, state_row, self.mma, self.layouts).launch(
            grid=(num_blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        lora,
        scales: GroupScales,
        written: BackwardTensors,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: GroupMma,
        layouts: Layouts,
    ):
        self.run_warps(operands, lora, token, tile_table, state_row, mma, scales, layouts, (None, written))

    def own_position(self, unit, column_tile):
        """Compute this thread's (row of half a tile, first column) in a unit, which is four rows of one of a tile's two
        groups."""
        lane = cute.arch.lane_idx()
        return unit // 2 * 4 + lane // 8, (column_tile * 2 + unit % 2) * GROUP + lane % 8 * (VECTORS * VECTOR)

    @cute.jit
    def load(self, into, tensors: cutlass.Constexpr, first: Int32, end: Int32, row: Int32, column: Int32):
        """Load gate and up of a thread's columns of a row, zeros past the last row or column; returns the routing
        weight."""
        width, routed = tensors.h.shape[1] // 2, Float32(0.0)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        into.fill(0.0)  # else registers would be kept from the unit before, and spill
        row += first
        if row < end:
            routed = tensors.routing_weight[tensors.pair[row]]
            if column < width:
                for side in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(VECTORS):
                        offset = Int64(row) * (2 * width) + side * width + column + i * VECTOR
                        cute.copy(copy, global_vector(tensors.h, offset), into[None, i, side])
        return routed

    @cute.jit
    def epilogue_half_tile(
        self,
        shared: cutlass.Constexpr,
        to: cutlass.Constexpr,
        first: Int32,
        end: Int32,
        column_tile: Int32,
        half: cutlass.Constexpr,
        epilogue_warp,
    ):
        """Compute half a tile: a warp takes four rows of a group of columns at a time, eight threads a row, and a
        thread 16 columns, whose h is loaded one such unit ahead."""
        lane, tensors = cute.arch.lane_idx(), to.rows
        row_thread, width = lane % 8, tensors.h.shape[1] // 2
        h_now, h_next = (cute.make_rmem_tensor((VECTOR, VECTORS, 2), self.dtype) for _ in range(2))
        da = cute.make_rmem_tensor(VECTOR, Float32)
        rows = cutlass.max(cutlass.min(end - first, WARPGROUP_M), 0)
        units = (rows + 3) // 4 * 2  # of a tile's two groups
        routed = self.load(h_now, tensors, first, end, *self.own_position(epilogue_warp, column_tile))
        for unit in cutlass.range(epilogue_warp, units, self.num_epilogue_warps, unroll=1):
            next_position = self.own_position(unit + self.num_epilogue_warps, column_tile)
            routed_next = self.load(h_next, tensors, first, end, *next_position)
            row, column = self.own_position(unit, column_tile)
            is_row, partial = (row < rows) & (column < math.ceil(width / GROUP) * GROUP), Float32(0.0)
            for i in cutlass.range_constexpr(VECTORS):
                self.read_product(da, shared, half, unit % 2 * 2 + row_thread // 4, row, row_thread % 4 * VECTORS + i)
                if const_expr(width % GROUP):
                    if column >= width:
                        da.fill(0.0)
                partial += self.compute_dh(h_now, da, routed, i, tensors, first + row, is_row, column)
            if const_expr(tensors.partials is not None):
                for mask in (1, 2, 4):
                    partial += cute.arch.shuffle_sync_bfly(partial, mask)
                if is_row and row_thread == 0:
                    tensors.partials[column // GROUP, first + row] = partial
            if const_expr(to.scaled is not None):
                for side in cutlass.range_constexpr(2):
                    self.write_scaled(to.scaled, h_now, first + row, is_row, column, side)
            routed = routed_next
            for v in cutlass.range_constexpr(cute.size(h_now)):
                h_now[v] = h_next[v]

    @cute.jit
    def compute_dh(
        self,
        values,
        da,
        routed: Float32,
        i: cutlass.Constexpr,
        tensors: cutlass.Constexpr,
        row: Int32,
        is_row,
        column: Int32,
    ):
        """Compute dh in place of a vector of gates and one of ups, and a'; store both, and return what they add to dw."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        partial, width = Float32(0.0), tensors.h.shape[1] // 2
        a_values = cute.make_rmem_tensor(VECTOR, self.dtype)
        for v in cutlass.range_constexpr(VECTOR):
            indices = [v + VECTOR * (i + VECTORS * side) for side in range(2)]
            gate, up = (values[index].to(Float32) for index in indices)
            act, *gradients = activate(gate, up, *self.activation, routed * da[v])
            partial += da[v] * act
            for index, gradient in zip(indices, gradients):
                values[index] = gradient.to(self.dtype)
            a_values[v] = (routed * act).to(self.dtype)
        if is_row and column < width:
            offset = Int64(row) * width + column + i * VECTOR
            if const_expr(tensors.a is not None):
                cute.copy(copy, a_values, global_vector(tensors.a, offset))
            if const_expr(tensors.dh is not None):
                for side in cutlass.range_constexpr(2):
                    to_dh = global_vector(tensors.dh, offset + Int64(row) * width + side * width)
                    cute.copy(copy, values[None, i, side], to_dh)
        return partial

    @cute.jit
    def write_scaled(self, to: cutlass.Constexpr, values, row: Int32, is_row, column: Int32, side: cutlass.Constexpr):
        """Store a thread's row_thread of a group of dh in e4m3, and the group's scale."""
        num_pairs = to.values.shape[1]
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        packed = cute.make_rmem_tensor(VECTOR, self.dtype)
        own = range(VECTORS * VECTOR * side, VECTORS * VECTOR * (side + 1))
        scale = quantize_group(packed, [values[index].to(Float32) for index in own], SMALLEST_GRADIENT)
        if is_row:
            offset = Int64(row) * num_pairs + side * (num_pairs // 2) + column // 2
            cute.copy(copy, packed, global_vector(to.values, offset))
            if column % GROUP == 0:
                to.scales[row, side * (to.scales.shape[1] // 2) + column // GROUP] = scale
