"""Weight gradients: out[e] = sum over e's rows r of direct[r]^T gathered[token[r]].

The rows are the depth of the product, so both operands lie the other way round in shared memory (MN-major). The direct
side is read through a ragged TMA view and is zero past the expert's end; the gathered side repeats the
expert's last row there, so nothing of other experts, or of unwritten rows, gets in. An expert without rows gets zeros.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

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
from .multiply import consumer_fragments, consumer_mma, issue, multiply, multiply_tile, narrow_fragment, narrower
from .rows import look_up, table_and_counter
from .work import NONE_LEFT, place

HEIGHT = 256  # of a tile: a consumer computes two halves of 64 of its 128
QUARTER = HEIGHT // 4  # loaded by each of the four producer warps
REGISTERS = (40, 232)  # of the first warpgroup and of the consumers: 3 * 168 in all
MOST_TOGETHER, TOGETHER = 8, 4  # rows of an expert's tiles that pass over all columns together; where there are more
GROUP = DEPTH * 128  # bytes of 64 columns of the gathered side, which lie together, swizzled over eight rows


class GradientKernel:
    """direct [R, M], gathered [T, N] -> out [E, M, N], stored with N or with M contiguous.

    A tile is as large as registers allow, because what is loaded for it comes from L2, whose bandwidth decides where
    experts have few rows. The gathered side is the narrow one: a copy of 16 bytes costs the producer as much as a TMA
    load of a box.
    """

    def __init__(self, dtype, tile: Tile):
        self.dtype = dtype
        self.columns, self.stages = tile.columns, tile.stages

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
        quarter = operand_layout(self.dtype, QUARTER, False, self.stages)
        atom, tensor = load_atom(ragged_columns(direct), one_stage(quarter), (QUARTER, DEPTH))
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
        """The part of a consumer, `own` 0 or 1: its 128 rows of every tile. The lower half is stored after the
        next tile's first products of the upper one: what was stored of the upper half is read until then."""
        (top_a, fragment_b, top), (bottom_a, _, bottom) = (
            consumer_fragments(tiled_mma, shared, 2 * own + half, self.columns) for half in range(2)
        )
        narrow_b = narrow_fragment(narrow_mma, shared, self.last_columns)
        thread = cute.arch.thread_idx()[0] % 128
        store = piece_store(tiled_mma, shared.pieces, self.dtype, thread, own, self.columns // PIECE, self.across)
        to_send = bottom, store, shared, atom_out, tensor_out
        stage, phase = Int32(0), Int32(0)
        unsent = Int32(-1), Int32(0), Int32(0), Int32(0)  # expert (-1: none), half, wide, whether there are rows
        expert, start, end, tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            high, wide = self.place(tile)
            stage, phase = multiply_tile(
                tiled_mma, narrow_mma, (top, bottom), (top_a, bottom_a), fragment_b, narrow_b, self.last_columns,
                wide == self.wide - 1, (shared.ring, stage, phase, (end - start + 15) // 16, to_send, unsent),
                by=self.multiply_halves,
            )  # fmt: skip
            self.send(top, *to_send[1:], expert, 4 * high + 2 * own, wide, start < end)
            unsent = expert, 4 * high + 2 * own + 1, wide, Int32(start < end)
            expert, start, end, tile = shared.work.receive(turn)
            turn += 1
        self.send_if_any(*to_send, unsent)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def multiply_halves(
        self, tiled_mma, accumulators, fragments_a, fragment_b, ring: cutlass.Constexpr, stage: Int32, phase: Int32,
        blocks: Int32, to_send, unsent,
    ):  # fmt: skip
        """The products of `blocks` blocks of 16 rows; the last tile's lower half is sent after the first of them."""
        in_stage = cute.size(fragment_b, mode=[2])
        first = cutlass.min(blocks, in_stage)
        begun = stage, blocks > 0
        if blocks > 0:
            cute.arch.mbarrier_wait(ring.full + stage, phase)
        for half in cutlass.range_constexpr(2):
            warpgroup.fence()
            for block in cutlass.range(first, unroll=1):
                # zeros from anything else than wgmma would have the compiler wait for the other half's products
                tiled_mma.set(warpgroup.Field.ACCUMULATE, block > 0)
                issue(tiled_mma, accumulators[half : half + 1], fragments_a[half : half + 1], fragment_b, block, stage)
            warpgroup.commit_group()
            if const_expr(half == 0):
                warpgroup.wait_group(1)
                self.send_if_any(*to_send, unsent)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        if blocks > 0:
            stage, phase = advance(stage, phase, ring.stages)
        left = blocks - first
        return multiply(
            tiled_mma, accumulators, fragments_a, fragment_b, ring, stage, phase, left // in_stage,
            rest=left % in_stage, begun=begun,
        )  # fmt: skip

    @cute.jit
    def send_if_any(
        self,
        accumulator: cute.Tensor,
        store: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        atom_out,
        tensor_out,
        unsent,
    ):
        expert, half, wide, has_rows = unsent
        if expert >= 0:
            self.send(accumulator, store, shared, atom_out, tensor_out, expert, half, wide, has_rows > 0)

    @cute.jit
    def send(
        self, accumulator: cute.Tensor, store: cutlass.Constexpr, shared: cutlass.Constexpr, atom_out, tensor_out,
        expert: Int32, half: Int32, wide: Int32, has_rows,
    ):  # fmt: skip
        """Store the half-th HALF rows of a tile's columns, what is past the last row or column excepted; zeros where the
        expert has no rows."""
        values = store.retile(accumulator)
        boxes = cute.local_tile(tensor_out[None, None, expert], (HALF, PIECE), (half, None))
        from_out, to_out = partition(atom_out, shared.pieces, boxes)
        store.wait()
        for p in cutlass.range_constexpr(self.columns // PIECE):
            if has_rows:
                store.write(p, lambda v, start=p * store.size: values[start + v])
            else:
                store.write(p, lambda v: Float32(0.0))
        store.publish()
        if store.issuer:
            for p in cutlass.range_constexpr(self.columns // PIECE):
                box = wide * (self.columns // PIECE) + p
                cute.copy(atom_out, from_out[None, store.buffer(p)], to_out[None, box])
            cute.arch.cp_async_bulk_commit_group()

    def place(self, tile):
        """(row, column) of an expert's tile."""
        if self.high <= MOST_TOGETHER:
            return tile % self.high, tile // self.high
        return place(tile, self.high, self.wide, TOGETHER)

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
        """The producer warpgroup's part: the direct side by TMA, the other by 16-byte copies of token[r]'s columns.

        As in rows.py the next item is found while stages of this one are waited for; a stage's tokens are looked up a
        stage earlier. An item without rows has no stages and takes one step.
        """
        thread = cute.arch.thread_idx()[0]
        work, full, empty = shared.work, shared.ring.full, shared.ring.empty
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, row_in_pass = thread % 8, thread // 8
        together = 16  # rows copied at a time
        passes, groups = DEPTH // together, self.columns // 64
        target = shared.b.iterator.toint() + row_in_pass * 128 + (chunk ^ row_in_pass % 8) * 16
        width = gathered.shape[1]
        tokens, places = cute.make_rmem_tensor(passes, Int32), cute.make_rmem_tensor(passes, Uint32)
        number = work.first()
        expert, start, end, tile = self.find(offsets, number)
        work.hand_round(warp, (expert, start, end, tile), Int32(0))
        look_up(tokens, token, start + row_in_pass, end, together)
        stage, phase, turn = Int32(0), Int32(1), Int32(1)
        while expert >= 0:
            if warp == 0:
                number = work.claim()
            next_expert, next_start, next_end, next_tile = NONE_LEFT
            high, wide = self.place(tile)
            first = wide * self.columns + chunk * CHUNK
            of_expert = ragged_columns_rows(tensor, start, end)
            boxes = cute.local_tile(of_expert, (QUARTER, DEPTH), (4 * high + warp, None))
            quarter = cute.local_tile(shared.a, (QUARTER, DEPTH), (warp, 0, None))
            to_direct, from_direct = partition(atom, quarter, boxes)
            steps = cutlass.max((end - start + DEPTH - 1) // DEPTH, 1)
            for depth in cutlass.range(steps, unroll=1):
                if warp == 0:
                    if depth == steps // 2:
                        next_expert, next_start, next_end, next_tile = self.find(offsets, work.claimed(number))
                for i in cutlass.range_constexpr(passes):
                    places[i] = (tokens[i] * width).to(Uint32) * 2
                if depth < steps - 1:
                    look_up(tokens, token, start + (depth + 1) * DEPTH + row_in_pass, end, together)
                else:
                    next_item = next_expert, next_start, next_end, next_tile
                    next_expert, next_start, next_end, next_tile = work.hand_round(warp, next_item, turn)
                    turn += 1
                    look_up(tokens, token, next_start + row_in_pass, next_end, together)
                if start < end:
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    if warp == 0:
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
            expert, start, end, tile = next_expert, next_start, next_end, next_tile
