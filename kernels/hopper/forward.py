"""up: h[r] = x[token[r]] @ gate_up[e]^T (+ bias[e]) and a[r] = act(h[r]), in one pass; h in the order of gate_up."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .activations import activate
from .configs import Tile
from .core import CHUNK, HALF, PIECE, THREADS, global_chunk, one_stage, store_atom
from .finish import LANE_ROWS, FinishedKernel
from .rows import ragged_h


class UpKernel(FinishedKernel):
    """x [T, H] gathered, gate_up [E, 2I, H]; h by TMA from where the product lies, a by 16-byte stores."""

    gather_warps = 2  # one copies rows too slowly, and a is little work

    def __init__(self, dtype, tile: Tile, activation, interleaved: bool):
        super().__init__(dtype, tile, gated=not interleaved)
        self.activation = activation
        self.interleaved = interleaved

    @cute.jit
    def __call__(
        self, x: cute.Tensor, gate_up: cute.Tensor, bias, h, a, token: cute.Tensor, table: cute.Tensor,
        last: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        _, tensor_x, atom_w, tensor_w = self.set_up(x, gate_up)
        self.set_up_finish(computed_with=a is not None)
        atom_h, tensor_h = None, None
        if const_expr(h is not None):
            atom_h, tensor_h = store_atom(ragged_h(h, self.interleaved), one_stage(self.layout), (HALF, PIECE))
        self.kernel(
            tensor_x, atom_w, tensor_w, atom_h, tensor_h, a, bias, token, table, last, self.tiled_mma,
            self.narrow_mma, self.layout_a, self.layout_b, self.layout,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensor_x: cute.Tensor, atom_w: cute.CopyAtom, tensor_w: cute.Tensor, atom_h, tensor_h, a,
        bias, token: cute.Tensor, table: cute.Tensor, last: Int32, tiled_mma: cute.TiledMma, narrow_mma,
        layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout, layout: cute.ComposedLayout,
    ):  # fmt: skip
        self.divide_work(
            None, tensor_x, atom_w, tensor_w, token, table, last, tiled_mma, narrow_mma, bias, layout_a, layout_b, layout,
            (atom_h, tensor_h, a),
        )  # fmt: skip

    @cute.jit
    def write_a(
        self, shared: cutlass.Constexpr, a: cute.Tensor, first: Int32, end: Int32, column_tile: Int32,
        half: cutlass.Constexpr, finisher,
    ):  # fmt: skip
        """a of half a tile: a finishing warp takes every third unit of LANE_ROWS rows and PIECE columns."""
        lane = cute.arch.lane_idx()
        chunk, width = lane % (PIECE // CHUNK), a.shape[1]
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * CHUNK)
        left, right = (cute.make_rmem_tensor(CHUNK, Float32) for _ in range(2))
        out = cute.make_rmem_tensor(CHUNK, self.dtype)
        across = self.pieces // 2  # units that lie side by side
        rows = cutlass.max(cutlass.min(end - first, HALF), 0)
        units = (rows + LANE_ROWS - 1) // LANE_ROWS * across
        for unit in cutlass.range(finisher, units, self.finishers, unroll=1):
            row, piece = unit // across * LANE_ROWS + lane // (PIECE // CHUNK), unit % across
            if const_expr(self.interleaved):
                self.read_product(left, shared, half, 2 * piece + chunk // 4, row, 2 * (chunk % 4))
                self.read_product(right, shared, half, 2 * piece + chunk // 4, row, 2 * (chunk % 4) + 1)
            else:
                self.read_product(left, shared, half, piece, row, chunk)
                self.read_product(right, shared, half, piece + across, row, chunk)
            for v in cutlass.range_constexpr(CHUNK):
                out[v] = activate(*gate_and_up(left, right, v, self.interleaved), *self.activation)[0].to(self.dtype)
            column = (column_tile * across + piece) * PIECE + chunk * CHUNK
            if row < rows and column < width:
                cute.copy(copy, out, global_chunk(a, Int64(first + row) * width + column))


def gate_and_up(left, right, v: int, interleaved: bool):
    """Gate and up of the v-th value of a chunk of a, from two chunks of h."""
    if interleaved:
        pair = (left, right)[2 * v // CHUNK]
        return pair[2 * v % CHUNK], pair[2 * v % CHUNK + 1]
    return left[v], right[v]
