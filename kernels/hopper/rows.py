"""Grouped GEMMs whose rows are sorted by expert: what they share; up, down and input_rows.

One work item is a tile of 128 rows of one expert times a tile of columns; GROUP row tiles pass over all columns together,
so that both operands of the tiles in flight stay in L2. Rows past an expert's end are computed from whatever lies there
and clipped by the ragged TMA store.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .activations import activate
from .configs import Tile
from .core import (
    DEPTH,
    HALF,
    PIECE,
    ROWS,
    THREADS,
    advance,
    consumer_fragments,
    consumer_mma,
    enter,
    gather_atom,
    gmem_piece,
    load_atom,
    multiply,
    one_stage,
    operand_layout,
    partition,
    piece_layout,
    piece_store,
    ragged,
    ragged_halves,
    ragged_pieces,
    storage,
    store_atom,
)

GROUP = 8
UP_PIECES = 3  # h's gate and up, and a
GATHER_PASSES = ROWS * DEPTH // (128 * 8)  # 16-byte copies of a producer thread per stage


class RowsKernel:
    """Shared by the kernels over sorted rows: sources, weights, the producer, the order of work items.

    columns: of the product's tile. gather: rows of the source are named by `token`. gated: the weight's 2I rows are two
    halves, and a tile takes columns / 2 of each.
    """

    instruction_columns = 256

    def __init__(self, dtype, tile: Tile, gather: bool, gated: bool = False):
        self.dtype = dtype
        self.columns, self.stages, self.slots = tile
        self.gather = gather
        self.halves = 2 if gated else 1

    def set_up(self, source, weight):
        """Layouts and TMA atoms of the operands; `weight` is [E, N, K], or for gated kernels [E, 2I, K]."""
        experts, rows, depth = weight.shape
        stride_e, stride_n, stride_k = weight.stride
        k_major = stride_k == 1
        per_half = rows // self.halves
        self.column_tiles = math.ceil(per_half / (self.columns // self.halves))
        self.depth_tiles = math.ceil(depth / DEPTH)
        view = cute.make_tensor(
            weight.iterator,
            cute.make_layout(
                (per_half, depth, self.halves, experts), stride=(stride_n, stride_k, stride_n * per_half, stride_e)
            ),
        )
        self.layout_a = operand_layout(self.dtype, ROWS, True, self.stages)
        self.layout_b = operand_layout(self.dtype, self.columns, k_major, self.stages)
        half_b = operand_layout(self.dtype, self.columns // self.halves, k_major, self.stages)
        self.tiled_mma = consumer_mma(self.dtype, True, k_major, min(self.columns, self.instruction_columns))
        if const_expr(self.gather):
            atom_a, tensor_a = None, source
        else:
            atom_a, tensor_a = load_atom(source, one_stage(self.layout_a), (ROWS, DEPTH))
        atom_b, tensor_b = load_atom(view, one_stage(half_b), (self.columns // self.halves, DEPTH))
        return atom_a, tensor_a, atom_b, tensor_b

    @cute.jit
    def place(self, item: Int32):
        """(row tile, column tile) of a work item."""
        in_group = item % (GROUP * self.column_tiles)
        return item // (GROUP * self.column_tiles) * GROUP + in_group % GROUP, in_group // GROUP

    @cute.jit
    def expert_of(self, tiles: cute.Tensor, row_tile: Int32):
        """The expert of a row tile, -1 where there is none."""
        expert = Int32(-1)
        if row_tile < tiles.shape[0]:
            expert = tiles[row_tile, 0]
        return expert

    def num_items(self, tiles):
        return cute.ceil_div(tiles.shape[0], GROUP) * (GROUP * self.column_tiles)

    @cute.jit
    def produce(
        self,
        atom_a,
        tensor_a,
        atom_b,
        tensor_b,
        shared_a,
        shared_b,
        full,
        empty,
        token: cute.Tensor,
        tiles: cute.Tensor,
    ):
        """The producer warps' part: fill the ring for every work item of this block."""
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        bytes_b = self.columns * DEPTH * 2
        bytes_a = ROWS * DEPTH * 2
        half_columns = self.columns // self.halves
        stage, phase = Int32(0), Int32(1)
        item, items = cute.arch.block_idx()[0], self.num_items(tiles)
        copy_atom = gather_atom(self.dtype)
        chunk = thread % 8
        while item < items:
            row_tile, column_tile = self.place(item)
            expert = self.expert_of(tiles, row_tile)
            if expert >= 0:
                first, end = tiles[row_tile, 1], tiles[row_tile, 2]
                offsets = cute.make_rmem_tensor(GATHER_PASSES, Int32)
                if const_expr(self.gather):
                    for i in cutlass.range_constexpr(GATHER_PASSES):
                        # past the end the last row again, and not one row for all tiles: every SM would wait for it
                        row = cutlass.min(first + thread // 8 + 16 * i, end - 1)
                        offsets[i] = token[row] * tensor_a.shape[1] + chunk * 8
                else:
                    global_a = cute.local_tile(cute.domain_offset((first, 0), tensor_a), (ROWS, DEPTH), (0, None))
                    to_a, from_a = partition(atom_a, shared_a, global_a)
                for depth in cutlass.range(self.depth_tiles, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    if const_expr(not self.gather) or warp_index == 0:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(
                                full + stage, bytes_b if const_expr(self.gather) else bytes_a + bytes_b
                            )
                        for half in cutlass.range_constexpr(self.halves):
                            box = cute.local_tile(
                                tensor_b[None, None, half, expert], (half_columns, DEPTH), (column_tile, depth)
                            )
                            target = cute.local_tile(shared_b[None, None, stage], (half_columns, DEPTH), (half, 0))
                            to_b, from_b = partition(atom_b, target, box)
                            cute.copy(atom_b, from_b, to_b, tma_bar_ptr=full + stage)
                        if const_expr(not self.gather):
                            cute.copy(atom_a, from_a[None, depth], to_a[None, stage], tma_bar_ptr=full + stage)
                    if const_expr(self.gather):
                        # columns past the last are read twice instead: the weight is zero there
                        column = cutlass.min(depth * DEPTH, tensor_a.shape[1] - 8 - chunk * 8)
                        for i in cutlass.range_constexpr(GATHER_PASSES):
                            target = cute.local_tile(shared_a[thread // 8 + 16 * i, None, stage], (8,), (chunk,))
                            cute.copy(copy_atom, gmem_piece(tensor_a, offsets[i] + column), target)
                        cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                    stage, phase = advance(stage, phase, self.stages)
            item += cute.arch.grid_dim()[0]

    def producer_arrivals(self):
        return 1 + (128 if self.gather else 0)

    def producer_registers(self):
        return 40

    def consumer_registers(self):
        return 232

    def is_producer(self, warp_index):
        """Whether a warp of the producer warpgroup has work: all of them gather, one issues TMA."""
        return warp_index < (4 if self.gather else 1)


class ProductKernel(RowsKernel):
    """out[r] = source[r or token[r]] @ weight[e]^T (+ bias[e]): down, and input_rows."""

    @cute.jit
    def __call__(
        self, source: cute.Tensor, weight: cute.Tensor, bias, out: cute.Tensor, token: cute.Tensor,
        tiles: cute.Tensor, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        atom_a, tensor_a, atom_b, tensor_b = self.set_up(source, weight)
        pieces = piece_layout(self.dtype, 2 * (self.columns // PIECE))
        atom_out, tensor_out = store_atom(ragged(out), one_stage(pieces), (HALF, PIECE))
        self.Storage = storage(self.dtype, self.layout_a, self.layout_b, pieces, 2 * self.stages)
        self.kernel(
            atom_a, tensor_a, atom_b, tensor_b, atom_out, tensor_out, bias, token, tiles, self.tiled_mma,
            self.layout_a, self.layout_b, pieces,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, atom_a, tensor_a: cute.Tensor, atom_b: cute.CopyAtom, tensor_b: cute.Tensor, atom_out: cute.CopyAtom,
        tensor_out: cute.Tensor, bias, token: cute.Tensor, tiles: cute.Tensor, tiled_mma: cute.TiledMma,
        layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout, pieces: cute.ComposedLayout,
    ):  # fmt: skip
        thread = cute.arch.thread_idx()[0]
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        shared = enter(
            self.Storage, layout_a, layout_b, pieces, self.stages, self.producer_arrivals(), (), (atom_b, atom_out)
        )

        if group == 0:
            cute.arch.setmaxregister_decrease(self.producer_registers())
            if self.is_producer(warp_index):
                self.produce(
                    atom_a,
                    tensor_a,
                    atom_b,
                    tensor_b,
                    shared.a,
                    shared.b,
                    shared.ring.full,
                    shared.ring.empty,
                    token,
                    tiles,
                )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers())
            half = group - 1
            fragment_a, fragment_b, accumulator = consumer_fragments(tiled_mma, shared, half, self.columns)
            store = piece_store(tiled_mma, shared.pieces, self.dtype, thread % 128, half, self.columns // PIECE)
            values = store.retile(accumulator)
            places = store.retile(
                tiled_mma.get_slice(thread % 128).partition_C(cute.make_identity_tensor((HALF, self.columns)))
            )
            stage, phase = Int32(0), Int32(0)
            item, items = cute.arch.block_idx()[0], self.num_items(tiles)
            while item < items:
                row_tile, column_tile = self.place(item)
                expert = self.expert_of(tiles, row_tile)
                if expert >= 0:
                    first, end = tiles[row_tile, 1], tiles[row_tile, 2]
                    stage, phase = multiply(
                        tiled_mma, accumulator, fragment_a, fragment_b, shared.ring.full, shared.ring.empty, stage, phase,
                        Int32(self.depth_tiles), self.stages,
                    )  # fmt: skip
                    rows = ragged_pieces(tensor_out, first + HALF * half, end)
                    from_out, to_out = partition(atom_out, shared.pieces, rows)
                    if const_expr(bias is not None):
                        first_column = column_tile * self.columns
                        add_bias(values, places, 0, cute.size(values), bias, expert, first_column, bias.shape[1])
                    store.wait()
                    for p in cutlass.range_constexpr(self.columns // PIECE):
                        store.write(p, lambda v, start=p * store.size: values[start + v])
                    store.publish()
                    if store.issuer:
                        for p in cutlass.range_constexpr(self.columns // PIECE):
                            box = column_tile * (self.columns // PIECE) + p
                            cute.copy(atom_out, from_out[None, store.buffer(p)], to_out[None, box])
                        cute.arch.cp_async_bulk_commit_group()
                item += cute.arch.grid_dim()[0]
            cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def add_bias(
    values, places, start: cutlass.Constexpr, count: cutlass.Constexpr, bias: cute.Tensor, expert: Int32, first: Int32,
    end: Int32,
):  # fmt: skip
    """values[start .. start + count] += bias[expert, first + column], nothing past column `end` of the bias."""
    for v in cutlass.range_constexpr(start, start + count):
        if const_expr(v // 2 % 2 == 0):  # the next two are of the same columns, eight rows below
            column = first + places[v][1]
            if column < end:
                value = bias[expert, column].to(Float32)
                values[v] += value
                values[v + 2] += value


def halves(h):
    """[R, 2I] as (R, I, 2): the gate half and the up half."""
    inner = h.shape[1] // 2
    return cute.make_tensor(h.iterator, cute.make_layout((h.shape[0], inner, 2), stride=(h.stride[0], 1, inner)))


def ragged_h(h, interleaved: bool):
    """h for stores by `piece_of_h`."""
    return ragged(h) if interleaved else ragged_halves(h)


def piece_of_h(interleaved: bool, i: int, piece):
    """Where the i-th of the two pieces of h lies that a's `piece` comes from: (its half, if h has halves), piece."""
    return ((), 2 * piece + i) if interleaved else ((i,), piece)


class UpKernel(RowsKernel):
    """h[r] = x[token[r]] @ gate_up[e]^T (+ bias[e]) and a[r] = act(h[r]); h in the order of gate_up."""

    def __init__(self, dtype, tile: Tile, activation, interleaved: bool):
        super().__init__(dtype, tile, gather=True, gated=not interleaved)
        self.activation = activation
        self.interleaved = interleaved

    @cute.jit
    def __call__(
        self, x: cute.Tensor, gate_up: cute.Tensor, bias, h, a, token: cute.Tensor, tiles: cute.Tensor,
        blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        _, tensor_x, atom_w, tensor_w = self.set_up(x, gate_up)
        pieces = piece_layout(self.dtype, 2 * UP_PIECES)
        atom_h, tensor_h, atom_a, tensor_a = None, None, None, None
        if const_expr(h is not None):
            atom_h, tensor_h = store_atom(ragged_h(h, self.interleaved), one_stage(pieces), (HALF, PIECE))
        if const_expr(a is not None):
            atom_a, tensor_a = store_atom(ragged(a), one_stage(pieces), (HALF, PIECE))
        self.Storage = storage(self.dtype, self.layout_a, self.layout_b, pieces, 2 * self.stages)
        self.kernel(
            tensor_x, atom_w, tensor_w, atom_h, tensor_h, atom_a, tensor_a, bias, token, tiles, self.tiled_mma,
            self.layout_a, self.layout_b, pieces,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensor_x: cute.Tensor, atom_w: cute.CopyAtom, tensor_w: cute.Tensor, atom_h, tensor_h, atom_a, tensor_a,
        bias, token: cute.Tensor, tiles: cute.Tensor, tiled_mma: cute.TiledMma, layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout, pieces: cute.ComposedLayout,
    ):  # fmt: skip
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        shared = enter(self.Storage, layout_a, layout_b, pieces, self.stages, self.producer_arrivals(), (), (atom_w,))

        if group == 0:
            cute.arch.setmaxregister_decrease(self.producer_registers())
            self.produce(
                None, tensor_x, atom_w, tensor_w, shared.a, shared.b, shared.ring.full, shared.ring.empty, token, tiles
            )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers())
            half = group - 1
            inner = self.columns // 2  # columns of a in a tile
            fragment_a, fragment_b, accumulator = consumer_fragments(tiled_mma, shared, half, self.columns)
            store = piece_store(tiled_mma, shared.pieces, self.dtype, thread % 128, half, UP_PIECES)
            values = store.retile(accumulator)
            places = store.retile(
                tiled_mma.get_slice(thread % 128).partition_C(cute.make_identity_tensor((HALF, self.columns)))
            )
            stage, phase = Int32(0), Int32(0)
            item, items = cute.arch.block_idx()[0], self.num_items(tiles)
            while item < items:
                row_tile, column_tile = self.place(item)
                expert = self.expert_of(tiles, row_tile)
                if expert >= 0:
                    first, end = tiles[row_tile, 1] + HALF * half, tiles[row_tile, 2]
                    stage, phase = multiply(
                        tiled_mma, accumulator, fragment_a, fragment_b, shared.ring.full, shared.ring.empty, stage, phase,
                        Int32(self.depth_tiles), self.stages,
                    )  # fmt: skip
                    for p in cutlass.range_constexpr(inner // PIECE):
                        # values of the two pieces of h that piece p of a comes from
                        starts = [store.size * i for i in self.pieces_in_tile(p)]
                        if const_expr(bias is not None):
                            for i in cutlass.range_constexpr(2):
                                self.add_bias_of_h(bias, expert, column_tile, values, places, starts, store.size, i)
                        store.wait()
                        if const_expr(atom_h is not None):
                            for i in cutlass.range_constexpr(2):
                                store.write(i, lambda v, start=starts[i]: values[start + v])
                        if const_expr(atom_a is not None):
                            self.write_a(store, shared.pieces, values, places, starts)
                        store.publish()
                        if store.issuer:
                            box = column_tile * (inner // PIECE) + p
                            if const_expr(atom_h is not None):
                                for i in cutlass.range_constexpr(2):
                                    of_h, box_h = piece_of_h(self.interleaved, i, box)
                                    rows = ragged_pieces(tensor_h, first, end, *of_h)
                                    from_h, to_h = partition(atom_h, shared.pieces, rows)
                                    cute.copy(atom_h, from_h[None, store.buffer(i)], to_h[None, box_h])
                            if const_expr(atom_a is not None):
                                from_a, to_a = partition(atom_a, shared.pieces, ragged_pieces(tensor_a, first, end))
                                cute.copy(atom_a, from_a[None, store.buffer(2)], to_a[None, box])
                            cute.arch.cp_async_bulk_commit_group()
                item += cute.arch.grid_dim()[0]
            cute.arch.cp_async_bulk_wait_group(0)

    def pieces_in_tile(self, p: int):
        """Which two pieces of the tile's accumulators piece p of a comes from."""
        return (2 * p, 2 * p + 1) if self.interleaved else (p, p + self.columns // 2 // PIECE)

    def add_bias_of_h(self, bias, expert, column_tile, values, places, starts, count, i):
        """Bias for the i-th of two pieces of h, whose values begin at `starts`."""
        half = 0 if self.interleaved else i
        width, limit = self.columns // self.halves, bias.shape[1] // self.halves  # a tile's columns of a half, and all
        first = column_tile * width + half * (limit - width)
        add_bias(values, places, starts[i], count, bias, expert, first, (half + 1) * limit)

    def write_a(self, store, pieces, values, places, starts):
        """A piece of a, from the values of two pieces of h that begin at `starts`."""
        if not self.interleaved:
            gate, up = starts
            store.write(2, lambda v: activate(values[gate + v], values[up + v], *self.activation)[0])
            return
        start = starts[0]  # the second follows; a thread holds gate and up of every fourth column of a
        for v in range(start, start + 2 * store.size, 2):
            row, column = places[v]
            value = activate(values[v], values[v + 1], *self.activation)[0]
            pieces[row, column // 2 % PIECE, store.buffer(2)] = value.to(self.dtype)
