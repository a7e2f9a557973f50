"""down_backward: one pass over dout gives da', and an epilogue of its own reads h once and writes dh, a' and dw.

    da' = dout W2,  dh = w da' act'(h),  a' = w act(h),  dw = <da', act(h)>      (paper, section 3)

The epilogue takes a third of a product's time in instructions alone, so a fourth warpgroup does it while the next tile
is multiplied: the multiplying warpgroups hand da' over through shared memory in the tensors' dtype. h comes by TMA into
slots and dh leaves from them, a' from where da' was.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from .activations import activate
from .configs import Tile
from .core import (
    HALF,
    PIECE,
    consumer_fragments,
    enter,
    load_atom,
    multiply,
    one_stage,
    partition,
    piece_layout,
    ragged,
    ragged_pieces,
    storage,
    store_atom,
)
from .rows import RowsKernel, halves, piece_of_h, ragged_h

THREADS = 512  # a producer, two multiplying and one finishing warpgroup
REGISTERS = (56, 176, 104)  # of each; four warpgroups start with 128
PIECE_BYTES = HALF * PIECE * 2
CHUNK = 8  # columns of a row that a thread of it takes at a time
FINISHER = 1  # the named barrier of the finishing warpgroup


class DownBackwardKernel(RowsKernel):
    """dout [T, H] gathered, weight [E, I, H] (a view of down), h [R, 2I]."""

    def __init__(self, dtype, tile: Tile, activation, interleaved: bool):
        super().__init__(dtype, tile, gather=True)
        self.activation = activation
        self.interleaved = interleaved
        # wider instructions want more registers than four warpgroups start with
        self.instruction_columns = self.columns if self.columns <= 192 else 128
        self.pieces = self.columns // PIECE

    @cute.jit
    def __call__(
        self, dout: cute.Tensor, weight: cute.Tensor, h: cute.Tensor, routing_weight: cute.Tensor, dh, a, parts,
        pair: cute.Tensor, token: cute.Tensor, tiles: cute.Tensor, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        _, tensor_dout, atom_w, tensor_w = self.set_up(dout, weight)
        layout = piece_layout(self.dtype, 2 * self.pieces + 2 * self.slots)  # da' of both halves, then h's slots
        atom_h, tensor_h = load_atom(h if self.interleaved else halves(h), one_stage(layout), (HALF, PIECE))
        atom_dh, tensor_dh, atom_a, tensor_a = None, None, None, None
        if const_expr(dh is not None):
            atom_dh, tensor_dh = store_atom(ragged_h(dh, self.interleaved), one_stage(layout), (HALF, PIECE))
        if const_expr(a is not None):
            atom_a, tensor_a = store_atom(ragged(a), one_stage(layout), (HALF, PIECE))
        self.own_arrivals = (4, 4, 1) + (1,) * self.slots  # handed over of each half, taken, loaded of each slot
        self.Storage = storage(
            self.dtype, self.layout_a, self.layout_b, layout, 2 * self.stages + len(self.own_arrivals)
        )
        self.kernel(
            tensor_dout, atom_w, tensor_w, atom_h, tensor_h, routing_weight, atom_dh, tensor_dh, atom_a, tensor_a,
            parts, token, pair, tiles, self.tiled_mma, self.layout_a, self.layout_b, layout,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self, tensor_dout: cute.Tensor, atom_w: cute.CopyAtom, tensor_w: cute.Tensor, atom_h: cute.CopyAtom,
        tensor_h: cute.Tensor, routing_weight: cute.Tensor, atom_dh, tensor_dh, atom_a, tensor_a, parts,
        token: cute.Tensor, pair: cute.Tensor, tiles: cute.Tensor, tiled_mma: cute.TiledMma,
        layout_a: cute.ComposedLayout, layout_b: cute.ComposedLayout, layout: cute.ComposedLayout,
    ):  # fmt: skip
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        shared = enter(
            self.Storage, layout_a, layout_b, layout, self.stages, self.producer_arrivals(), self.own_arrivals,
            (atom_w, atom_h),
        )  # fmt: skip
        handed_over = shared.ring.end  # of each half of the tile
        taken = handed_over + 2
        loaded = taken + 1

        if group == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            self.produce(
                None, tensor_dout, atom_w, tensor_w, shared.a, shared.b, shared.ring.full, shared.ring.empty, token,
                tiles,
            )  # fmt: skip
        elif group < 3:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.multiply_tiles(tiled_mma, shared, handed_over, taken, tiles)
        else:
            cute.arch.setmaxregister_decrease(REGISTERS[2])
            self.finish_tiles(
                tiled_mma, shared.pieces, handed_over, taken, loaded, atom_h, tensor_h, routing_weight, atom_dh,
                tensor_dh, atom_a, tensor_a, parts, pair, tiles,
            )  # fmt: skip

    @cute.jit
    def multiply_tiles(self, tiled_mma, shared: cutlass.Constexpr, handed_over, taken, tiles: cute.Tensor):
        """A multiplying warpgroup's part: da' of its half of every tile, handed over in shared memory."""
        thread = cute.arch.thread_idx()[0]
        half = cute.arch.make_warp_uniform(thread // 128) - 1
        fragment_a, fragment_b, accumulator = consumer_fragments(tiled_mma, shared, half, self.columns)
        op = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        store = cute.make_tiled_copy_S(op, cute.make_tiled_copy_C_atom(op, tiled_mma))
        store_to = store.get_slice(thread % 128).partition_D(shared.pieces)
        da = cute.make_rmem_tensor(
            cute.shape(store.get_slice(thread % 128).partition_S(shared.pieces))[:3], self.dtype
        )
        size = cute.size(da)
        values = store.retile(accumulator)
        stage, phase, taken_phase = Int32(0), Int32(0), Int32(1)
        item, items = cute.arch.block_idx()[0], self.num_items(tiles)
        while item < items:
            row_tile, _ = self.place(item)
            if self.expert_of(tiles, row_tile) >= 0:
                stage, phase = multiply(
                    tiled_mma, accumulator, fragment_a, fragment_b, shared.ring.full, shared.ring.empty, stage, phase,
                    Int32(self.depth_tiles), self.stages,
                )  # fmt: skip
                cute.arch.mbarrier_wait(taken, taken_phase)
                taken_phase ^= 1
                for p in cutlass.range_constexpr(self.pieces):
                    for v in cutlass.range_constexpr(size):
                        da[v] = values[p * size + v].to(self.dtype)
                    cute.copy(store, da, store_to[None, None, None, half * self.pieces + p])
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(handed_over + half)
            item += cute.arch.grid_dim()[0]

    @cute.jit
    def finish_tiles(
        self, tiled_mma, shared_pieces, handed_over, taken, loaded, atom_h, tensor_h, routing_weight: cute.Tensor,
        atom_dh, tensor_dh, atom_a, tensor_a, parts, pair: cute.Tensor, tiles: cute.Tensor,
    ):  # fmt: skip
        """The finishing warpgroup's part: h in, dh, a' and dw out, piece by piece, one half of the tile first."""
        me = cute.arch.thread_idx()[0] % 128
        issuer = cute.arch.make_warp_uniform(me // 32) == 0
        # two threads share a row, so that 16 bytes of eight rows are read at a time without bank conflicts
        my_row, side = me // 32 * 16 + me % 16, me % 32 // 16
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * CHUNK)
        left, right, da = (cute.make_rmem_tensor(CHUNK, self.dtype) for _ in range(3))
        routed, partial = Float32(0.0), Float32(0.0)
        used, tile_phase = Int32(0), Int32(0)  # slots filled so far, over all tiles
        item, items = cute.arch.block_idx()[0], self.num_items(tiles)
        while item < items:
            row_tile, column_tile = self.place(item)
            if self.expert_of(tiles, row_tile) >= 0:
                first, end = tiles[row_tile, 1], tiles[row_tile, 2]
                if issuer:
                    for q in cutlass.range_constexpr(self.slots):
                        self.load_h(atom_h, tensor_h, shared_pieces, loaded, first, column_tile, used, q)
                for q in cutlass.range(2 * self.pieces, unroll=1):
                    half, p = q // self.pieces, q % self.pieces
                    top = first + HALF * half
                    if p == 0:
                        partial = Float32(0.0)
                        routed = routed_weight(routing_weight, pair, top + my_row, end)
                        cute.arch.mbarrier_wait(handed_over + half, tile_phase)
                    slot = (used + q) % self.slots
                    h_piece = 2 * self.pieces + 2 * slot
                    cute.arch.mbarrier_wait(loaded + slot, (used + q) // self.slots & 1)
                    for i in cutlass.range_constexpr(PIECE // 2 // CHUNK):
                        of_da = row_chunk(shared_pieces, my_row, q, PIECE // 2 // CHUNK * side + i)
                        of_left, of_right = self.chunks_of_h(shared_pieces, my_row, h_piece, side, i)
                        cute.copy(copy, of_left, left)
                        cute.copy(copy, of_right, right)
                        cute.copy(copy, of_da, da)
                        for v in cutlass.range_constexpr(CHUNK):
                            (gate, g), (up, u) = self.gate_and_up(left, right, v)
                            slope = da[v].to(Float32)
                            act, slope_gate, slope_up = activate(
                                gate[g].to(Float32), up[u].to(Float32), *self.activation
                            )
                            partial += slope * act
                            slope = routed * slope
                            gate[g] = (slope * slope_gate).to(self.dtype)
                            up[u] = (slope * slope_up).to(self.dtype)
                            da[v] = (routed * act).to(self.dtype)
                        if const_expr(atom_dh is not None):
                            cute.copy(copy, left, of_left)
                            cute.copy(copy, right, of_right)
                        if const_expr(atom_a is not None):
                            cute.copy(copy, da, of_da)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=FINISHER, number_of_threads=128)
                    if issuer:
                        box = column_tile * self.pieces + p
                        if const_expr(atom_dh is not None):
                            for i in cutlass.range_constexpr(2):
                                of_dh, box_dh = piece_of_h(self.interleaved, i, box)
                                rows = ragged_pieces(tensor_dh, top, end, *of_dh)
                                from_dh, to_dh = partition(atom_dh, shared_pieces, rows)
                                cute.copy(atom_dh, from_dh[None, h_piece + i], to_dh[None, box_dh])
                        if const_expr(atom_a is not None):
                            from_a, to_a = partition(atom_a, shared_pieces, ragged_pieces(tensor_a, top, end))
                            cute.copy(atom_a, from_a[None, q], to_a[None, box])
                        cute.arch.cp_async_bulk_commit_group()
                        if q + self.slots < 2 * self.pieces:
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                            self.load_h(
                                atom_h, tensor_h, shared_pieces, loaded, first, column_tile, used, q + self.slots
                            )
                    if const_expr(parts is not None):  # noqa: SIM102  (decided while compiling)
                        if p == self.pieces - 1:
                            total = partial + cute.arch.shuffle_sync_bfly(partial, 16)
                            if side == 0 and top + my_row < end:
                                parts[column_tile, top + my_row] = total
                if issuer:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(taken)
                used += 2 * self.pieces
                tile_phase ^= 1
            item += cute.arch.grid_dim()[0]
        cute.arch.cp_async_bulk_wait_group(0)

    def load_h(self, atom_h, tensor_h, shared_pieces, loaded, first, column_tile, used, q):
        """Issue the loads of h's q-th piece of the tile, gate and up, into its slot; by one warp."""
        half, p = q // self.pieces, q % self.pieces
        slot = (used + q) % self.slots
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded + slot, 2 * PIECE_BYTES)
        for i in range(2):
            of_h, box = piece_of_h(self.interleaved, i, column_tile * self.pieces + p)
            rows = cute.local_tile(
                cute.domain_offset((first + HALF * half, 0), tensor_h[(None, None, *of_h)]), (HALF, PIECE), (0, None)
            )
            to_h, from_h = partition(atom_h, shared_pieces, rows)
            to_slot = to_h[None, 2 * self.pieces + 2 * slot + i]
            cute.copy(atom_h, from_h[None, box], to_slot, tma_bar_ptr=loaded + slot)

    def chunks_of_h(self, shared_pieces, row, h_piece, side, i):
        """Where the h of the i-th chunk of a thread's da lies in shared memory: two chunks."""
        per_side = PIECE // 2 // CHUNK
        if self.interleaved:  # gate and up of half a piece of da fill one piece
            return tuple(row_chunk(shared_pieces, row, h_piece + side, 2 * i + c) for c in range(2))
        return tuple(row_chunk(shared_pieces, row, h_piece + c, per_side * side + i) for c in range(2))

    def gate_and_up(self, left, right, v: int):
        """(registers, index) of the gate and of the up that belong to the v-th value of da's chunk."""
        if self.interleaved:
            pair = (left, right)[2 * v // CHUNK], 2 * v % CHUNK
            return pair, (pair[0], pair[1] + 1)
        return (left, v), (right, v)


def row_chunk(shared_pieces, row, piece, chunk):
    """CHUNK columns of a row of a piece in shared memory: 16 bytes."""
    return cute.local_tile(shared_pieces[row, None, piece], (CHUNK,), (chunk,))


@cute.jit
def routed_weight(routing_weight: cute.Tensor, pair: cute.Tensor, row: Int32, end: Int32):
    """The routing weight of a row, 0 past the end."""
    value = Float32(0.0)
    if row < end:
        value = routing_weight[pair[row]]
    return value
