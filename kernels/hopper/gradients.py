"""Weight gradients: out[e] = sum over e's rows r of direct[r]^T gathered[token[r]].

The rows are the depth of the product, so both operands lie the other way round in shared memory (MN-major). The direct
side is read through a ragged TMA view and is zero past the expert's end; the gathered side repeats the
expert's last row there, so nothing of other experts, or of unwritten rows, gets in. An expert without rows gets zeros.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from .configs import Tile
from .core import (
    CHUNK,
    CONSUMER_WARPS,
    DEPTH,
    HALF,
    PIECE,
    THREADS,
    advance,
    enter,
    gather_chunk,
    load_atom,
    one_stage,
    operand_layout,
    partition,
    piece_layout,
    piece_store,
    ragged_columns,
    ragged_columns_rows,
    storage,
    store_atom,
)
from .multiply import consumer_fragments, consumer_mma, multiply_tile, narrow_fragment, narrower
from .rows import table_and_counter
from .work import NONE_LEFT

HEIGHT = 256  # of a tile: a consumer computes two halves of 64 of its 128
REGISTERS = (40, 232)  # of the first warpgroup and of the consumers: 3 * 168 in all
GROUP = DEPTH * 128  # bytes of 64 columns of the gathered side, which lie together, swizzled over eight rows


class GradientKernel:
    """direct [R, M], gathered [T, N] -> out [E, M, N], stored with N or with M contiguous.

    A tile is as large as registers allow, because what is loaded for it comes from L2, whose bandwidth decides where
    experts have few rows. The gathered side is the narrow one: a copy of 16 bytes costs the producer as much as a TMA
    load of a box.
    """

    def __init__(self, dtype, tile: Tile):
        self.dtype = dtype
        self.columns, self.stages = tile

    @cute.jit
    def __call__(
        self, gathered: cute.Tensor, direct: cute.Tensor, out: cute.Tensor, token: cute.Tensor, offsets: cute.Tensor,
        table: cute.Tensor, last: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        _, height, width = out.shape
        self.across = out.stride[1] == 1
        self.high, self.wide = math.ceil(height / HEIGHT), math.ceil(width / self.columns)
        self.last_columns, narrow_mma = narrower(width, self.columns), None
        if const_expr(self.last_columns):
            narrow_mma = consumer_mma(self.dtype, False, False, self.last_columns)
        layout_a = operand_layout(self.dtype, HEIGHT, False, self.stages)
        layout_b = operand_layout(self.dtype, self.columns, False, self.stages)
        pieces = piece_layout(self.dtype, 2 * (self.columns // PIECE), self.across)
        atom, tensor = load_atom(ragged_columns(direct), one_stage(layout_a), (HEIGHT, DEPTH))
        target = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        atom_out, tensor_out = store_atom(target, one_stage(pieces), (HALF, PIECE))
        self.Storage = storage(self.dtype, layout_a, layout_b, pieces, self.stages, 0)
        self.kernel(
            atom, tensor, gathered, atom_out, tensor_out, token, offsets, table, last,
            consumer_mma(self.dtype, False, False, self.columns), narrow_mma, layout_a, layout_b, pieces,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, atom: cute.CopyAtom, tensor: cute.Tensor, gathered: cute.Tensor, atom_out: cute.CopyAtom,
        tensor_out: cute.Tensor, token: cute.Tensor, offsets: cute.Tensor, table: cute.Tensor, last: Int32,
        tiled_mma: cute.TiledMma, narrow_mma, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
        pieces: cute.ComposedLayout,
    ):  # fmt: skip
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        _, counter = table_and_counter(table, last)
        items = (offsets.shape[0] - 1) * (self.high * self.wide)
        shared = enter(
            self.Storage, layout_a, layout_b, pieces, self.stages, 1 + 128, (), (atom, atom_out), counter, items,
            4 + CONSUMER_WARPS,
        )  # fmt: skip
        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            self.produce(atom, tensor, gathered, shared, token, offsets)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.multiply(tiled_mma, narrow_mma, shared, group - 1, atom_out, tensor_out)

    @cute.jit
    def multiply(self, tiled_mma, narrow_mma, shared: cutlass.Constexpr, own, atom_out, tensor_out):
        """The part of a consumer, `own` 0 or 1: its 128 rows of every tile."""
        (top_a, fragment_b, top), (bottom_a, _, bottom) = (
            consumer_fragments(tiled_mma, shared, 2 * own + half, self.columns) for half in range(2)
        )
        narrow_b = narrow_fragment(narrow_mma, shared, self.last_columns)
        thread = cute.arch.thread_idx()[0] % 128
        store = piece_store(tiled_mma, shared.pieces, self.dtype, thread, own, self.columns // PIECE, self.across)
        stage, phase = Int32(0), Int32(0)
        expert, start, end, tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            high, wide = self.place(tile)
            stage, phase = multiply_tile(
                tiled_mma, narrow_mma, (top, bottom), (top_a, bottom_a), fragment_b, narrow_b, self.last_columns,
                wide == self.wide - 1, shared.ring, stage, phase, (end - start) // DEPTH,
                rest=((end - start) % DEPTH + 15) // 16,
            )  # fmt: skip
            self.send(store, top, shared, atom_out, tensor_out, expert, 4 * high + 2 * own, wide)
            self.send(store, bottom, shared, atom_out, tensor_out, expert, 4 * high + 2 * own + 1, wide)
            expert, start, end, tile = shared.work.receive(turn)
            turn += 1
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def send(
        self, store: cutlass.Constexpr, accumulator: cute.Tensor, shared: cutlass.Constexpr, atom_out, tensor_out,
        expert: Int32, half: Int32, wide: Int32,
    ):  # fmt: skip
        """Store the half-th HALF rows of a tile's columns, what is past the last row or column excepted."""
        values = store.retile(accumulator)
        boxes = cute.local_tile(tensor_out[None, None, expert], (HALF, PIECE), (half, None))
        from_out, to_out = partition(atom_out, shared.pieces, boxes)
        store.wait()
        for p in cutlass.range_constexpr(self.columns // PIECE):
            store.write(p, lambda v, start=p * store.size: values[start + v])
        store.publish()
        if store.issuer:
            for p in cutlass.range_constexpr(self.columns // PIECE):
                box = wide * (self.columns // PIECE) + p
                cute.copy(atom_out, from_out[None, store.buffer(p)], to_out[None, box])
            cute.arch.cp_async_bulk_commit_group()

    def place(self, tile):
        """(row, column) of an expert's tile."""
        return tile % self.high, tile // self.high

    @cute.jit
    def find(self, offsets: cute.Tensor, number: Int32):
        """The work item of a number, which may be -1, as an Item's fields: an expert's tiles run together."""
        expert, start, end, tile = NONE_LEFT
        if number >= 0:
            expert, tile = number // (self.high * self.wide), number % (self.high * self.wide)
            start, end = offsets[expert], offsets[expert + 1]
        return expert, start, end, tile

    @cute.jit
    def produce(
        self, atom, tensor, gathered: cute.Tensor, shared: cutlass.Constexpr, token: cute.Tensor, offsets: cute.Tensor
    ):
        """The producer warpgroup's part: the direct side by TMA, the other by 16-byte copies of token[r]'s columns."""
        thread = cute.arch.thread_idx()[0]
        work, full, empty = shared.work, shared.ring.full, shared.ring.empty
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, row_in_pass = thread % 8, thread // 8
        together = 16  # rows copied at a time
        passes, groups = DEPTH // together, self.columns // 64
        target = shared.b.iterator.toint() + row_in_pass * 128 + (chunk ^ row_in_pass % 8) * 16
        width = gathered.shape[1]
        number = work.first()
        expert, start, end, tile = self.find(offsets, number)
        if warp_index == 0:
            work.pass_on((expert, start, end, tile), Int32(0))
        else:
            work.receive(Int32(0))
        stage, phase, turn = Int32(0), Int32(1), Int32(1)
        while expert >= 0:
            if warp_index == 0:
                number = work.claim()
            high, wide = self.place(tile)
            first = wide * self.columns + chunk * CHUNK
            of_expert = ragged_columns_rows(tensor, start, end)
            boxes = cute.local_tile(of_expert, (HEIGHT, DEPTH), (high, None))
            to_direct, from_direct = partition(atom, shared.a, boxes)
            for depth in cutlass.range((end - start + DEPTH - 1) // DEPTH, unroll=1):
                places = cute.make_rmem_tensor(passes, Uint32)
                for i in cutlass.range_constexpr(passes):
                    row = start + depth * DEPTH + row_in_pass + i * together
                    places[i] = (token[cutlass.min(row, end - 1)] * width).to(Uint32) * 2
                cute.arch.mbarrier_wait(empty + stage, phase)
                if warp_index == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, HEIGHT * DEPTH * 2)
                    cute.copy(atom, from_direct[None, depth], to_direct[None, stage], tma_bar_ptr=full + stage)
                for g in cutlass.range_constexpr(groups):
                    # columns past the last are read twice instead, and clipped when stored
                    column = cutlass.min(first + g * 64, width - CHUNK)
                    source = gathered.iterator.toint() + Int64(column * 2)
                    for i in cutlass.range_constexpr(passes):
                        gather_chunk(
                            target + stage * (groups * GROUP) + g * GROUP + i * (together * 128),
                            source + places[i].to(Int64),
                        )  # fmt: skip
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage, phase = advance(stage, phase, self.stages)
            if warp_index == 0:
                expert, start, end, tile = self.find(offsets, work.claimed(number))
                work.pass_on((expert, start, end, tile), turn)
            else:
                expert, start, end, tile = work.receive(turn)
            turn += 1
