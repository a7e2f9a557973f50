"""down and input_rows: out[r] = source[r] @ weight[e]^T (+ bias[e])."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from .configs import MOST_COLUMNS, Tile
from .core import (
    CONSUMER_WARPS,
    HALF,
    PIECE,
    ROWS,
    THREADS,
    enter,
    one_stage,
    partition,
    piece_layout,
    ragged,
    ragged_pieces,
    storage,
    store_atom,
)
from .finish import FinishedKernel
from .multiply import consumer_fragments, multiply, multiply_tile, narrow_fragment, skip
from .rows import RowsKernel, add_bias, table_and_counter

REGISTERS = (24, 240)  # of the producer's warpgroup and of the consumers, whose accumulators take 192: 3 * 168 in all


class Product(RowsKernel):
    """source [R, K], weight [E, N, K]. Subclasses lay out what is stored (`set_up_finish`) and divide the work."""

    group = 2  # measured: faster than 8 where experts have few rows, as fast where they have many

    def __init__(self, dtype, tile: Tile):
        super().__init__(dtype, tile, gather=False)
        if tile.dealt:
            self.group = RowsKernel.group

    @cute.jit
    def __call__(
        self, source: cute.Tensor, weight: cute.Tensor, bias, out: cute.Tensor, token: cute.Tensor,
        table: cute.Tensor, last: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        atom_a, tensor_a, atom_b, tensor_b = self.set_up(source, weight)
        self.set_up_finish()
        atom_out, tensor_out = store_atom(ragged(out), one_stage(self.layout), (HALF, PIECE))
        self.kernel(
            atom_a, tensor_a, atom_b, tensor_b, atom_out, tensor_out, bias, token, table, last, self.tiled_mma,
            self.narrow_mma, self.layout_a, self.layout_b, self.layout,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, atom_a: cute.CopyAtom, tensor_a: cute.Tensor, atom_b: cute.CopyAtom, tensor_b: cute.Tensor,
        atom_out: cute.CopyAtom, tensor_out: cute.Tensor, bias, token: cute.Tensor, table: cute.Tensor,
        last: Int32, tiled_mma: cute.TiledMma, narrow_mma, layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout,
        layout: cute.ComposedLayout,
    ):  # fmt: skip
        self.divide_work(
            atom_a, tensor_a, atom_b, tensor_b, token, table, last, tiled_mma, narrow_mma, bias, layout_a, layout_b,
            layout, (atom_out, tensor_out, None),
        )  # fmt: skip


class ProductKernel(Product):
    """The consumers take turns: each multiplies all 128 rows of every other tile, and stores them while the other
    multiplies. The kernel's own barriers, one of each consumer, let it begin when all stages of the other's tile have
    arrived: only then do the phases of the ring's barriers, which have one bit, tell its stages from earlier ones. Rows
    past the 128th (of tiles of up to 192) are multiplied by the one whose turn it is not, from the same stages.
    """

    def __init__(self, dtype, tile: Tile):
        super().__init__(dtype, tile)
        self.buffers = self.pieces if self.rows == ROWS else 2  # of pieces, of each consumer: what there is room for
        if tile.columns > MOST_COLUMNS:
            raise ValueError(f"tiles of {tile.columns} columns: accumulators of over {MOST_COLUMNS} do not fit")
        if tile.dealt and self.rows > ROWS:
            raise ValueError(f"tiles of {tile.rows} rows: where one takes the rows of the next, items must be claimed")

    def set_up_finish(self):
        self.layout = piece_layout(self.dtype, 2 * self.buffers)
        self.Storage = storage(self.dtype, self.layout_a, self.layout_b, self.layout, self.stages, 2)

    @cute.jit
    def divide_work(
        self, atom_a, source: cute.Tensor, atom_w, tensor_w, token: cute.Tensor, table: cute.Tensor, last: Int32,
        tiled_mma, narrow_mma, bias, layout_a, layout_b, layout, of_store: cutlass.Constexpr,
    ):  # fmt: skip
        """Every warp's part."""
        atom_out, tensor_out, _ = of_store
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        of_one = CONSUMER_WARPS // 2
        tiles, counter = table_and_counter(table, last)
        shared = enter(
            self.Storage, layout_a, layout_b, layout, self.stages, self.producer_arrivals(), (of_one, of_one),
            (atom_w, atom_out), counter, self.num_items(tiles), 1 + CONSUMER_WARPS,
            consumer_warps=of_one if self.rows == ROWS else CONSUMER_WARPS, dealt=self.dealt,
        )  # fmt: skip
        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == 0:
                self.produce(atom_a, source, atom_w, tensor_w, shared, token, tiles)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.multiply(tiled_mma, narrow_mma, shared, group - 1, atom_out, tensor_out, bias)

    @cute.jit
    def multiply(self, tiled_mma, narrow_mma, shared: cutlass.Constexpr, own, atom_out, tensor_out, bias):
        """The part of a consumer, `own` 0 or 1: every other tile."""
        (top_a, fragment_b, top), (bottom_a, _, bottom) = (
            consumer_fragments(tiled_mma, shared, half, self.columns) for half in range(2)
        )
        narrow_b = narrow_fragment(narrow_mma, shared, self.last_columns)
        store, places = self.store_of(tiled_mma, shared, own)
        third_a = consumer_fragments(tiled_mma, shared, 2, self.columns)[0] if self.rows > ROWS else None
        ours, others = shared.own + own, shared.own + 1 - own
        stage, phase = Int32(0), Int32(0)
        expert, first, end, column_tile = shared.work.receive(Int32(0))
        turn = Int32(1)
        while expert >= 0:
            if (turn - 1) % 2 == own:
                cute.arch.mbarrier_wait(ours, ((turn - 1) // 2 + 1 - own) % 2)
                is_last = column_tile == self.column_tiles - 1
                arrivals = 1
                if const_expr(self.rows > ROWS):
                    arrivals = 2 - Int32(first + ROWS < end)  # for the other consumer too
                of_ring = shared.ring, stage, phase, Int32(self.depth_tiles), None, others, arrivals
                if first + HALF < end:
                    stage, phase = multiply_tile(
                        tiled_mma, narrow_mma, (top, bottom), (top_a, bottom_a), fragment_b, narrow_b,
                        self.last_columns, is_last, of_ring,
                    )  # fmt: skip
                else:
                    stage, phase = multiply_tile(
                        tiled_mma, narrow_mma, (top,), (top_a,), fragment_b, narrow_b, self.last_columns, is_last,
                        of_ring,
                    )  # fmt: skip
                self.send(store, top, places, shared, atom_out, tensor_out, bias, expert, first, end, column_tile)
                if first + HALF < end:
                    self.send(
                        store, bottom, places, shared, atom_out, tensor_out, bias, expert, first + HALF, end,
                        column_tile,
                    )  # fmt: skip
            else:
                if const_expr(third_a is None):
                    stage, phase = skip(stage, phase, self.depth_tiles, self.stages)
                else:
                    if first + ROWS < end:
                        stage, phase = multiply(
                            tiled_mma, (top,), (third_a,), fragment_b, shared.ring, stage, phase, Int32(self.depth_tiles)
                        )  # fmt: skip
                        self.send(
                            store, top, places, shared, atom_out, tensor_out, bias, expert, first + ROWS, end, column_tile
                        )  # fmt: skip
                    else:
                        stage, phase = skip(stage, phase, self.depth_tiles, self.stages)
            expert, first, end, column_tile = shared.work.receive(turn)
            turn += 1
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def send(
        self, store: cutlass.Constexpr, accumulator: cute.Tensor, places, shared: cutlass.Constexpr, atom_out, tensor_out,
        bias, expert: Int32, first: Int32, end: Int32, column_tile: Int32,
    ):  # fmt: skip
        """Store half a tile (+ bias), what of it is past row `end` or the last column excepted."""
        values = store.retile(accumulator)
        from_out, to_out = partition(atom_out, shared.pieces, ragged_pieces(tensor_out, first, end))
        for start in cutlass.range_constexpr(0, self.pieces, self.buffers):
            pieces = range(start, min(start + self.buffers, self.pieces))
            store.wait()
            for p in pieces:
                if const_expr(bias is not None):
                    column = column_tile * self.columns
                    add_bias(values, places, p * store.size, store.size, bias, expert, column, bias.shape[1])
                store.write(p - start, lambda v, start=p * store.size: values[start + v])
            store.publish()
            if store.issuer:
                for p in pieces:
                    box = column_tile * self.pieces + p
                    cute.copy(atom_out, from_out[None, store.buffer(p - start)], to_out[None, box])
                cute.arch.cp_async_bulk_commit_group()


class WideProductKernel(Product, FinishedKernel):
    """Each consumer multiplies half of every tile, and a finishing warp stores it. A tile of 256 columns loads less for a
    product than 192 do, but its accumulators leave no room for turns."""

    registers = 40, 232
