"""up: h[r] = x[token[r]] @ gate_up[e]^T (+ bias[e]) and a[r] = act(h[r]), in one pass; h in the order of gate_up."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .activations import activate, activate_ungated
from .config import EPI_TILE_N, VECTOR, WARPGROUP_M, Tile
from .epilogue import WARP_ROWS, EpilogueWarpsKernel
from .gemm_common import Layouts, Operands, global_vector, one_stage, tma_store
from .mainloop import Mma
from .varlen import varlen_h


class GemmUpKernel(EpilogueWarpsKernel):
    """GEMM of h, and a of it: x [T, H] gathered, gate_up [E, 2I, H], or [E, I, H] where the activation has no gate.

    Warpgroup 0: warps 0 and 1 produce, warps 2 and 3 are epilogue warps. The first of these stores h by TMA from where
    the product lies in shared memory; both compute a, and write it 16 bytes a thread.
    """

    gather_warps = 2  # one copies rows too slowly, and a is little work

    def __init__(self, dtype, tile: Tile, activation, interleaved: bool):
        self.is_gated = activation.is_gated
        # in_order: a tile's columns are neighbours in gate_up and h; otherwise half of them are gate's, half up's
        self.in_order = interleaved or not self.is_gated
        super().__init__(dtype, tile, gate_then_up=not self.in_order)
        self.activation = activation
        self.interleaved = interleaved

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        gate_up: cute.Tensor,
        bias,
        shrunk,
        factor,
        h,
        a,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        operands = self.set_up_operands(x, gate_up)
        lora = self.set_up_lora(shrunk, factor)
        self.set_up_epilogue(computed_with=a is not None)
        out = None
        if const_expr(h is not None):
            out = tma_store(varlen_h(h, self.in_order), one_stage(self.layouts.epilogue), (WARPGROUP_M, EPI_TILE_N))
        self.kernel(operands, lora, out, a, bias, token, tile_table, state_row, self.mma, self.layouts).launch(
            grid=(num_blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        lora,
        out,
        a,
        bias,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: Mma,
        layouts: Layouts,
    ):
        self.run_warps(operands, lora, token, tile_table, state_row, mma, bias, layouts, (out, a))

    @cute.jit
    def epilogue_half_tile(
        self,
        shared: cutlass.Constexpr,
        a: cute.Tensor,
        first: Int32,
        end: Int32,
        column_tile: Int32,
        half: cutlass.Constexpr,
        epilogue_warp,
    ):
        """Compute a of half a tile: an epilogue warp takes every second unit of WARP_ROWS rows and EPI_TILE_N columns."""
        lane = cute.arch.lane_idx()
        vector, width = lane % (EPI_TILE_N // VECTOR), a.shape[1]
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        left, right = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        out = cute.make_rmem_tensor(VECTOR, self.dtype)
        units_per_row = self.epi_tiles // 2 if self.is_gated else self.epi_tiles
        rows = cutlass.max(cutlass.min(end - first, WARPGROUP_M), 0)
        units = (rows + WARP_ROWS - 1) // WARP_ROWS * units_per_row
        for unit in cutlass.range(epilogue_warp, units, self.num_epilogue_warps, unroll=1):
            row = unit // units_per_row * WARP_ROWS + lane // (EPI_TILE_N // VECTOR)
            epi_tile = unit % units_per_row
            if const_expr(not self.is_gated):
                self.read_product(left, shared, half, epi_tile, row, vector)
            elif const_expr(self.interleaved):
                self.read_product(left, shared, half, 2 * epi_tile + vector // 4, row, 2 * (vector % 4))
                self.read_product(right, shared, half, 2 * epi_tile + vector // 4, row, 2 * (vector % 4) + 1)
            else:
                self.read_product(left, shared, half, epi_tile, row, vector)
                self.read_product(right, shared, half, epi_tile + units_per_row, row, vector)
            for v in cutlass.range_constexpr(VECTOR):
                out[v] = self.activate(left, right, v).to(self.dtype)
            column = (column_tile * units_per_row + epi_tile) * EPI_TILE_N + vector * VECTOR
            if row < rows and column < width:
                cute.copy(copy, out, global_vector(a, Int64(first + row) * width + column))

    def activate(self, left, right, v: int):
        """Compute the v-th value of a vector of a, from two vectors of h, or from the first alone."""
        if not self.is_gated:
            return activate_ungated(left[v], self.activation.name)[0]
        return activate(*gate_and_up(left, right, v, self.interleaved), *self.activation)[0]


def gate_and_up(left, right, v: int, interleaved: bool):
    """Pick gate and up of the v-th value of a vector of a, from two vectors of h."""
    if interleaved:
        pair = (left, right)[2 * v // VECTOR]
        return pair[2 * v % VECTOR], pair[2 * v % VECTOR + 1]
    return left[v], right[v]
