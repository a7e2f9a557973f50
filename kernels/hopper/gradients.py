"""Weight gradients: out[e] = sum over e's rows r of gathered[token[r]]^T direct[r].

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
    CONSUMER_WARPS,
    DEPTH,
    HALF,
    PIECE,
    ROWS,
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
from .multiply import consumer_fragments, consumer_mma, multiply, multiply_tile, narrow_fragment, narrower, skip
from .rows import table_and_counter
from .work import NONE_LEFT

TOGETHER, IN_TURNS = (56, 224), (40, 232)  # registers of the first warpgroup and of the consumers: 3 * 168 in all


class GradientKernel:
    """gathered [T, M], direct [R, N] -> out [E, M, N], stored with N or with M contiguous.

    The gathered side is the one of 128 columns: a copy of 16 bytes costs the producer as much as a TMA load of a box.
    """

    def __init__(self, dtype, tile: Tile):
        self.dtype = dtype
        self.columns, self.stages, self.in_turns = tile

    @cute.jit
    def __call__(
        self, gathered: cute.Tensor, direct: cute.Tensor, out: cute.Tensor, token: cute.Tensor, offsets: cute.Tensor,
        table: cute.Tensor, last: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        _, height, width = out.shape
        self.across = out.stride[1] == 1
        self.high, self.wide = math.ceil(height / ROWS), math.ceil(width / self.columns)
        layout_a = operand_layout(self.dtype, ROWS, False, self.stages)
        layout_b = operand_layout(self.dtype, self.columns, False, self.stages)
        pieces = piece_layout(self.dtype, 2 * (self.columns // PIECE), self.across)
        atom, tensor = load_atom(ragged_columns(direct), one_stage(layout_b), (self.columns, DEPTH))
        target = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        atom_out, tensor_out = store_atom(target, one_stage(pieces), (HALF, PIECE))

        self.last_columns, narrow_mma = narrower(width, self.columns) if const_expr(self.in_turns) else 0, None
        if const_expr(self.last_columns):
            narrow_mma = consumer_mma(self.dtype, False, False, self.last_columns)
        self.Storage = storage(self.dtype, layout_a, layout_b, pieces, self.stages, 2)
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
        thread = cute.arch.thread_idx()[0]
        group = cute.arch.make_warp_uniform(thread // 128)
        _, counter = table_and_counter(table, last)
        items = (offsets.shape[0] - 1) * (self.high * self.wide)
        shared = enter(
            self.Storage, layout_a, layout_b, pieces, self.stages, 1 + 128, (CONSUMER_WARPS // 2,) * 2, (atom, atom_out),
            counter, items, 4 + CONSUMER_WARPS,
            consumer_warps=CONSUMER_WARPS // 2 if const_expr(self.in_turns) else CONSUMER_WARPS,
        )  # fmt: skip

        if group == 0:
            cute.arch.setmaxregister_decrease(IN_TURNS[0] if const_expr(self.in_turns) else TOGETHER[0])
            self.produce(atom, tensor, gathered, shared, token, offsets)
        elif const_expr(self.in_turns):
            cute.arch.setmaxregister_increase(IN_TURNS[1])
            self.multiply_in_turns(tiled_mma, narrow_mma, shared, group - 1, atom_out, tensor_out)
        else:
            cute.arch.setmaxregister_increase(TOGETHER[1])
            self.multiply_together(tiled_mma, shared, group - 1, atom_out, tensor_out)

    @cute.jit
    def multiply_together(self, tiled_mma, shared: cutlass.Constexpr, own, atom_out, tensor_out):
        """The part of a consumer, `own` 0 or 1: its half of every tile."""
        fragment_a, fragment_b, accumulator = consumer_fragments(tiled_mma, shared, own, self.columns)
        store = self.store_of(tiled_mma, shared, own)
        stage, phase = Int32(0), Int32(0)
        expert, start, end, tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            stage, phase = multiply(
                tiled_mma, (accumulator,), (fragment_a,), fragment_b, shared.ring.full, shared.ring.empty, stage, phase,
                (end - start) // DEPTH, self.stages, rest=((end - start) % DEPTH + 15) // 16,
            )  # fmt: skip
            self.send(store, accumulator, shared, atom_out, tensor_out, expert, tile, own)
            expert, start, end, tile = shared.work.receive(turn)
            turn += 1
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def multiply_in_turns(self, tiled_mma, narrow_mma, shared: cutlass.Constexpr, own, atom_out, tensor_out):
        """The part of a consumer, `own` 0 or 1: every other tile, as in products.py."""
        (top_a, fragment_b, top), (bottom_a, _, bottom) = (
            consumer_fragments(tiled_mma, shared, half, self.columns) for half in range(2)
        )
        narrow_b = narrow_fragment(narrow_mma, shared, self.last_columns)
        store = self.store_of(tiled_mma, shared, own)
        stage, phase = Int32(0), Int32(0)
        expert, start, end, tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            if (turn - 1) % 2 == own:
                cute.arch.mbarrier_wait(shared.own + own, ((turn - 1) // 2 + 1 - own) % 2)
                stage, phase = multiply_tile(
                    tiled_mma, narrow_mma, (top, bottom), (top_a, bottom_a), fragment_b, narrow_b, self.last_columns,
                    self.place(tile)[1] == self.wide - 1, shared.ring, stage, phase, (end - start) // DEPTH,
                    rest=((end - start) % DEPTH + 15) // 16, arrived=shared.own + 1 - own,
                )  # fmt: skip
                self.send(store, top, shared, atom_out, tensor_out, expert, tile, 0)
                self.send(store, bottom, shared, atom_out, tensor_out, expert, tile, 1)
            else:
                stage, phase = skip(stage, phase, (end - start + DEPTH - 1) // DEPTH, self.stages)
            expert, start, end, tile = shared.work.receive(turn)
            turn += 1
        cute.arch.cp_async_bulk_wait_group(0)

    def store_of(self, tiled_mma, shared, own):
        thread = cute.arch.thread_idx()[0] % 128
        return piece_store(tiled_mma, shared.pieces, self.dtype, thread, own, self.columns // PIECE, self.across)

    @cute.jit
    def send(
        self, store: cutlass.Constexpr, accumulator: cute.Tensor, shared: cutlass.Constexpr, atom_out, tensor_out,
        expert: Int32, tile: Int32, half,
    ):  # fmt: skip
        """Store half a tile, what of it is past the last row or column excepted."""
        high, wide = self.place(tile)
        values = store.retile(accumulator)
        boxes = cute.local_tile(tensor_out[None, None, expert], (HALF, PIECE), (2 * high + half, None))
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
    ):  # fmt: skip
        """The producer warpgroup's part: the direct side by TMA, the other by 16-byte copies of token[r]'s columns."""
        thread = cute.arch.thread_idx()[0]
        work, full, empty = shared.work, shared.ring.full, shared.ring.empty
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunks = ROWS // 8  # of a row
        together = 128 // chunks  # rows copied at a time
        passes = DEPTH // together
        chunk, row_in_pass = thread % chunks, thread // chunks
        # 64 columns lie together, swizzled over eight rows
        target = (
            shared.a.iterator.toint() + chunk // 8 * (DEPTH * 128) + row_in_pass * 128
            + (chunk % 8 ^ row_in_pass) * 16
        )  # fmt: skip
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
            # columns past the last are read twice instead, and clipped when stored
            column = cutlass.min(high * ROWS + chunk * 8, width - 8)
            source = gathered.iterator.toint() + Int64(column * 2)
            of_expert = ragged_columns_rows(tensor, start, end)
            boxes = cute.local_tile(of_expert, (self.columns, DEPTH), (wide, None))
            to_direct, from_direct = partition(atom, shared.b, boxes)
            for depth in cutlass.range((end - start + DEPTH - 1) // DEPTH, unroll=1):
                places = cute.make_rmem_tensor(passes, Uint32)
                for i in cutlass.range_constexpr(passes):
                    row = start + depth * DEPTH + row_in_pass + i * together
                    places[i] = (token[cutlass.min(row, end - 1)] * width).to(Uint32) * 2
                cute.arch.mbarrier_wait(empty + stage, phase)
                if warp_index == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.columns * DEPTH * 2)
                    cute.copy(atom, from_direct[None, depth], to_direct[None, stage], tma_bar_ptr=full + stage)
                for i in cutlass.range_constexpr(passes):
                    gather_chunk(
                        target + stage * (DEPTH * ROWS * 2) + i * (together * 128), source + places[i].to(Int64)
                    )
                cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                stage, phase = advance(stage, phase, self.stages)
            if warp_index == 0:
                expert, start, end, tile = self.find(offsets, work.claimed(number))
                work.pass_on((expert, start, end, tile), turn)
            else:
                expert, start, end, tile = work.receive(turn)
            turn += 1
