"""Base of the GEMMs over rows sorted by expert (varlen-M): operands, the order of work tiles, and the producer.

A work tile is 128 rows of one expert times a column tile. Exceptions: up to 192 rows in a tall GEMM, and 64 in the last
wave of a gathering one, so that more SMs take part in it. Some row tiles pass over all columns together, so that both
operands of the tiles in flight stay in L2. Rows past an expert's end are computed from whatever lies there, and the
epilogue's store clips them. A half of the tile without rows is neither loaded nor multiplied.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from .config import EPI_TILE_N, K_BLOCK, THREADS, TILE_K, TILE_M, VECTOR, WARPGROUP_M, Tile
from .gemm_common import (
    Operands,
    advance,
    epilogue_store,
    look_up_tokens,
    one_stage,
    operand_layout,
    partition,
    tma_load,
)
from .mainloop import MainloopParams, Mma, columns_of_last_tile, consumer_mma
from .ptx import copy_async
from .tile_scheduler import NO_WORK, rasterize

MERGED = -2  # in place of an expert: the rows belong to the work tile before, which is tall
GATHER_ROWS = 4  # copied at a time by one producer warp, 128 bytes of each
STAGE_BYTES_A = TILE_M * TILE_K * 2


@dataclass(frozen=True)
class Gather:
    """A producer thread's part of the row gather: 16 bytes of every `rows_per_pass`-th row of the tile from `first_row`.

    vector: which 16 bytes of the stage's 128. targets: shared addresses in stage 0 of the passes over the first eight
    rows, after which the swizzle repeats. tokens: the rows' tokens. offsets: the rows' offsets in the source in bytes.
    """

    first_row: Int32
    vector: Int32
    rows_per_pass: int
    targets: tuple
    tokens: cute.Tensor
    offsets: cute.Tensor

    @property
    def passes(self) -> int:
        return TILE_M // self.rows_per_pass

    def target(self, i: int, targets_in_stage):
        """Compute the shared address that the i-th pass copies to."""
        lap, target = divmod(i, len(targets_in_stage))
        return targets_in_stage[target] + lap * (len(targets_in_stage) * self.rows_per_pass * TILE_K * 2)


def lora_atoms(lora: Operands | None):
    """List the TMA loads of an adapter's operands; none without one."""
    return () if lora is None else (lora.atom_a, lora.atom_b)


class VarlenMKernel:
    """Base of the kernels over sorted rows.

    columns: of the tile; a narrower last tile is multiplied with narrower instructions where there is one side. gather:
    rows of the source are named by `token`. gate_then_up: the weight's 2I rows are the gate's, then up's. It has two
    sides then, and a tile takes columns / 2 of each; otherwise it has one."""

    row_tiles_together = 8  # row tiles that pass over all columns together
    threads = THREADS  # of a block
    decoding_warps = 0  # behind the consumers, see decode.py
    gather_warps = 1  # of the producer warpgroup, copying rows; the first of them issues TMA too

    def __init__(self, dtype, tile: Tile, gather: bool, gate_then_up: bool = False):
        self.dtype = dtype
        self.columns, self.stages, self.rows, self.static = tile
        self.gather = gather
        self.weight_sides = 2 if gate_then_up else 1
        self.epi_tiles = self.epi_stages = self.columns // EPI_TILE_N

    def set_up_operands(self, source, weight) -> Operands:
        """Set up the operands, their layouts and MMAs; `weight` is [E, N, K], with two sides [E, 2I, K]."""
        k_major = weight.stride[2] == 1
        per_side = weight.shape[1] // self.weight_sides
        self.column_tiles = math.ceil(per_side / (self.columns // self.weight_sides))
        self.k_tiles = self.whole_k_tiles = math.ceil(weight.shape[2] / TILE_K)
        self.lora_k_tiles = self.tail_k_blocks = 0
        self.layout_a = operand_layout(self.dtype, self.rows, True, self.stages)
        self.layout_b = operand_layout(self.dtype, self.columns, k_major, self.stages)
        self.tiled_mma = consumer_mma(self.dtype, True, k_major, self.columns)
        narrow = self.weight_sides == 1 and self.rows == TILE_M  # else what it saves is not worth the registers
        self.last_columns = columns_of_last_tile(per_side, self.columns) if const_expr(narrow) else 0
        self.narrow_mma = None
        if const_expr(self.last_columns):
            self.narrow_mma = consumer_mma(self.dtype, True, k_major, self.last_columns)
        atom_a, tensor_a = (None, source) if const_expr(self.gather) else self.row_atom(source)
        return Operands(atom_a, tensor_a, *self.weight_atom(weight))

    def set_up_lora(self, shrunk, factor) -> Operands | None:
        """Set up an adapter's operands, or None without one: shrunk [P, J] in the order of the rows, factor [E, N, J] in
        the order of the weight. They are more depth: [source | shrunk] @ [weight | factor]^T, and their stages follow
        those of source and weight. The last stage's k blocks are computed as far as there are any of the J columns."""
        if shrunk is None:
            return None
        rank = shrunk.shape[1]
        if self.last_columns > 128:  # 192 of 256, where ptxas runs out of registers and serialises the wgmmas
            self.last_columns, self.narrow_mma = 0, None
        self.lora_k_tiles = math.ceil(rank / TILE_K)
        self.whole_k_tiles = self.k_tiles + rank // TILE_K
        self.tail_k_blocks = math.ceil(rank % TILE_K / K_BLOCK)
        return Operands(*self.row_atom(shrunk), *self.weight_atom(factor))

    @property
    def stage_bytes_b(self) -> int:
        return self.columns * TILE_K * 2

    @property
    def weight_bytes(self) -> int:
        """Count the bytes that TMA brings of a stage of the weight."""
        return self.stage_bytes_b

    @property
    def mma(self) -> Mma:
        return Mma(self.tiled_mma, self.narrow_mma)

    def row_atom(self, rows):
        """Make the TMA loads of 64 rows of a stage."""
        half_a = operand_layout(self.dtype, WARPGROUP_M, True, self.stages)
        return tma_load(rows, one_stage(half_a), (WARPGROUP_M, TILE_K))

    def weight_atom(self, weight):
        """Make the TMA loads of a stage of a weight [E, N, K]; each loads one of its sides."""
        experts, rows, depth = weight.shape
        stride_e, stride_n, stride_k = weight.stride
        per_side = rows // self.weight_sides
        view = cute.make_tensor(
            weight.iterator,
            cute.make_layout(
                (per_side, depth, self.weight_sides, experts),
                stride=(stride_n, stride_k, stride_n * per_side, stride_e),
            ),
        )
        side_b = operand_layout(self.dtype, self.columns // self.weight_sides, stride_k == 1, self.stages)
        return tma_load(view, one_stage(side_b), (self.columns // self.weight_sides, TILE_K))

    def tile_params(self, pipeline, stage, phase, order_barrier=None, arrivals=()) -> MainloopParams:
        """Make the arguments of `multiply` for a whole tile."""
        return MainloopParams(
            pipeline,
            stage,
            phase,
            k_tiles=Int32(self.whole_k_tiles),
            order_barrier=order_barrier,
            arrivals=arrivals,
            tail_k_blocks=self.tail_k_blocks or None,
            has_tail=True,
        )

    def half_tile_params(self, pipeline, stage, phase, has_rows) -> MainloopParams:
        """Make the arguments of `multiply` for half a tile, whose stages are released unread unless it `has_rows`."""
        k_tiles = has_rows * self.whole_k_tiles
        unused = self.k_tiles - k_tiles
        if self.lora_k_tiles:
            unused = (1 - has_rows) * (self.k_tiles + self.lora_k_tiles)
        return MainloopParams(
            pipeline,
            stage,
            phase,
            k_tiles=k_tiles,
            unused=unused,
            tail_k_blocks=self.tail_k_blocks or None,
            has_tail=has_rows > 0,
        )

    def whole_work_tiles(self, tiles):
        """Count (work tiles that are whole, work tiles that are cut into halves of 64 rows). Cut are those of the last
        wave where rows are gathered, and where that wave would leave half of the blocks without work."""
        total, blocks = tiles.shape[0] * self.column_tiles, cute.arch.grid_dim()[0]
        over = total % blocks
        cut = over * Int32(2 * over <= blocks) if const_expr(self.gather) else Int32(0)
        return total - cut, cut

    def num_work_tiles(self, tiles):
        """Count the work tiles, each half of a cut one for itself."""
        whole, cut = self.whole_work_tiles(tiles)
        return whole + 2 * cut

    @cute.jit
    def find_work_tile(self, tiles: cute.Tensor, index: Int32):
        """Find the work tile of an index, which may be -1. Returns a WorkTile's fields."""
        expert, first, end, column_tile = NO_WORK
        if index >= 0:
            if const_expr(self.gather):
                whole, _ = self.whole_work_tiles(tiles)
                half = index - whole  # of those that are cut
                index -= cutlass.max(half + 1, 0) // 2
            row_tile, column_tile = rasterize(index, tiles.shape[0], self.column_tiles, self.row_tiles_together)
            expert, first, end = tiles[row_tile, 0], tiles[row_tile, 1], tiles[row_tile, 2]
            if const_expr(self.gather):
                if half >= 0:
                    first = cutlass.min(first + half % 2 * WARPGROUP_M, end)
                    end = cutlass.min(first + WARPGROUP_M, end)
            if const_expr(self.rows > TILE_M):
                if end - first == TILE_M and row_tile + 1 < tiles.shape[0]:
                    if tiles[row_tile + 1, 0] == expert and tiles[row_tile + 1, 2] - end <= WARPGROUP_M:
                        end = tiles[row_tile + 1, 2]
                if end - first <= WARPGROUP_M and row_tile > 0:
                    if tiles[row_tile - 1, 0] == expert and first - tiles[row_tile - 1, 1] == TILE_M:
                        expert = Int32(MERGED)
        return expert, first, end, column_tile

    @cute.jit
    def find_unmerged(self, tiles: cute.Tensor, scheduler: cutlass.Constexpr, index: Int32):
        """Find the work tile of an index, or of the next ones where its rows are merged into the work tile before."""
        expert, first, end, column_tile = self.find_work_tile(tiles, index)
        if const_expr(self.rows > TILE_M):
            while expert == MERGED:
                next_index = scheduler.broadcast(scheduler.prefetch_dynamic())
                expert, first, end, column_tile = self.find_work_tile(tiles, next_index)
        return expert, first, end, column_tile

    @cute.jit
    def produce(
        self,
        operands: cutlass.Constexpr,
        lora: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        token: cute.Tensor,
        tiles: cute.Tensor,
    ):
        """Run the producer warps: fill the pipeline for every work tile of this block.

        The next work tile is found, and its tokens are looked up, while stages of this one are waited for. What is loaded
        for that is used a stage later at the earliest, so that nothing waits for it.
        """
        atom_a, tensor_a = operands.atom_a, operands.a
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        scheduler, full, empty = shared.scheduler, shared.pipeline.full, shared.pipeline.empty
        shared.arrivals.begin("producer", self.gather_warps)
        gather = self.set_up_gather(shared, warp)
        tokens, offsets = gather.tokens, gather.offsets
        index = scheduler.initial_index()
        expert, first, end, column_tile = self.find_unmerged(tiles, scheduler, index)
        scheduler.share(warp, (expert, first, end, column_tile), Int32(0))
        if const_expr(self.gather):
            look_up_tokens(tokens, token, first + gather.first_row, end, gather.rows_per_pass)
        stage, phase, tile_count = Int32(0), Int32(1), Int32(1)
        while expert >= 0:
            if warp == 0:
                index = scheduler.prefetch(index, tile_count)
            next_expert, next_first, next_end, next_column_tile = NO_WORK
            has_bottom = first + WARPGROUP_M < end
            if const_expr(self.gather):
                halves, tma_bytes = None, Int32(self.weight_bytes)
                for i in cutlass.range_constexpr(gather.passes):
                    offsets[i] = (tokens[i] * tensor_a.shape[1] + gather.vector * VECTOR).to(Uint32) * 2
            else:
                halves, tma_bytes = self.partition_a(
                    atom_a, tensor_a, shared, first, end, has_bottom, self.weight_bytes
                )
            for k_tile in cutlass.range(self.k_tiles, unroll=1):
                if warp == 0:
                    if k_tile == self.k_tiles // 2:
                        next_expert, next_first, next_end, next_column_tile = self.find_unmerged(
                            tiles, scheduler, scheduler.broadcast(index)
                        )
                if k_tile == self.k_tiles - 1:
                    next_work_tile = next_expert, next_first, next_end, next_column_tile
                    next_expert, next_first, next_end, next_column_tile = scheduler.share(
                        warp, next_work_tile, tile_count
                    )
                    tile_count += 1
                    if const_expr(self.gather):
                        look_up_tokens(tokens, token, next_first + gather.first_row, next_end, gather.rows_per_pass)
                cute.arch.mbarrier_wait(empty + stage, phase)
                if warp == 0:
                    shared.pipeline.announce(stage, tma_bytes)
                    self.load_b(operands.atom_b, operands.b, shared, expert, column_tile, k_tile, stage)
                if const_expr(self.gather):
                    self.gather_a(tensor_a, gather, k_tile, stage, has_bottom)
                    shared.pipeline.arrive_when_copied(stage)
                else:
                    self.load_a(atom_a, halves, full + stage, first, end, k_tile, stage)
                stage, phase = advance(stage, phase, self.stages)
            if const_expr(lora is not None):
                stage, phase = self.produce_lora(
                    lora, shared, warp, expert, first, end, column_tile, has_bottom, stage, phase
                )
            expert, first, end, column_tile = next_expert, next_first, next_end, next_column_tile

    @cute.jit
    def produce_lora(
        self,
        lora: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        warp,
        expert: Int32,
        first: Int32,
        end: Int32,
        column_tile: Int32,
        has_bottom,
        stage: Int32,
        phase: Int32,
    ):
        """Fill the stages of an adapter's depth, which is loaded by TMA also where the source is gathered: the gathering
        threads only arrive. Returns the pipeline's next stage and phase."""
        full, empty = shared.pipeline.full, shared.pipeline.empty
        halves, tma_bytes = self.partition_a(lora.atom_a, lora.a, shared, first, end, has_bottom, self.stage_bytes_b)
        for k_tile in cutlass.range(self.lora_k_tiles, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            if warp == 0:
                shared.pipeline.announce(stage, tma_bytes)
                self.load_b(lora.atom_b, lora.b, shared, expert, column_tile, k_tile, stage)
                self.load_a(lora.atom_a, halves, full + stage, first, end, k_tile, stage)
            if const_expr(self.gather):
                shared.pipeline.arrive_when_copied(stage)
            stage, phase = advance(stage, phase, self.stages)
        return stage, phase

    def set_up_gather(self, shared, warp) -> Gather:
        """Set up a producer thread's copies; meaningless where rows are not gathered."""
        lane = cute.arch.lane_idx()
        vector, lane_row = lane % 8, lane // 8
        rows_per_pass = self.gather_warps * GATHER_ROWS
        first_row = warp * GATHER_ROWS + lane_row
        targets = tuple(
            shared.a.iterator.toint() + (first_row + row) * (TILE_K * 2) + (vector ^ (first_row + row) % 8) * 16
            for row in range(0, 8, rows_per_pass)
        )
        tokens, offsets = (cute.make_rmem_tensor(TILE_M // rows_per_pass, kind) for kind in (Int32, Uint32))
        return Gather(first_row, vector, rows_per_pass, targets, tokens, offsets)

    def partition_a(self, atom_a, tensor_a, shared, first, end, has_bottom, bytes_b):
        """Split the TMA loads of every 64 rows of A into (shared, global) sides, and count the bytes of a stage, of which
        B has `bytes_b`."""
        rows_a = cute.domain_offset((first, 0), tensor_a)
        halves = [
            partition(
                atom_a,
                cute.local_tile(shared.a, (WARPGROUP_M, TILE_K), (half, 0, None)),
                cute.local_tile(rows_a, (WARPGROUP_M, TILE_K), (half, None)),
            )
            for half in range(self.rows // WARPGROUP_M)
        ]
        tma_bytes = Int32(bytes_b) + STAGE_BYTES_A // 2 * (1 + Int32(has_bottom))
        if self.rows > TILE_M:
            tma_bytes += STAGE_BYTES_A // 2 * Int32(first + TILE_M < end)
        return halves, tma_bytes

    def load_b(self, atom_b, tensor_b, shared, expert, column_tile, k_tile, stage):
        """Issue the TMA loads of a stage of the weight."""
        side_columns = self.columns // self.weight_sides
        for side in range(self.weight_sides):
            box = cute.local_tile(tensor_b[None, None, side, expert], (side_columns, TILE_K), (column_tile, k_tile))
            slot = cute.local_tile(shared.b[None, None, stage], (side_columns, TILE_K), (side, 0))
            to_b, from_b = partition(atom_b, slot, box)
            cute.copy(atom_b, from_b, to_b, tma_bar_ptr=shared.pipeline.full + stage)

    @cute.jit
    def load_a(self, atom_a, halves: cutlass.Constexpr, full, first: Int32, end: Int32, k_tile: Int32, stage: Int32):
        """Issue the TMA loads of a stage of A; none of a half without rows."""
        (to_top, from_top), *others = halves
        cute.copy(atom_a, from_top[None, k_tile], to_top[None, stage], tma_bar_ptr=full)
        for half, (to_half, from_half) in enumerate(others):
            if first + WARPGROUP_M * (half + 1) < end:
                cute.copy(atom_a, from_half[None, k_tile], to_half[None, stage], tma_bar_ptr=full)

    @cute.jit
    def gather_a(self, source: cute.Tensor, gather: cutlass.Constexpr, k_tile: Int32, stage: Int32, has_bottom):
        """Start a thread's copies of a stage of gathered rows; none of a half without rows."""
        address, size = source.iterator.toint() + Int64(k_tile * (TILE_K * 2)), None
        if const_expr(source.shape[1] % TILE_K):
            # columns past the last are zero, as the weight is there: infinity times that would be NaN
            past = (k_tile * TILE_K + (gather.vector + 1) * VECTOR - source.shape[1]) * 2
            address -= Int64(cutlass.max(past, 0))
            size = 16 * Int32(past <= 0)
        targets = [target + stage * STAGE_BYTES_A for target in gather.targets]
        for i in cutlass.range_constexpr(gather.passes // 2):
            copy_async(gather.target(i, targets), address + gather.offsets[i].to(Int64), size)
        if has_bottom:
            for i in cutlass.range_constexpr(gather.passes // 2, gather.passes):
                copy_async(gather.target(i, targets), address + gather.offsets[i].to(Int64), size)

    def store_of(self, tiled_mma, shared, consumer):
        """Make a consumer's store, and the (row, column) of every value of its accumulators."""
        thread = cute.arch.thread_idx()[0] % 128
        store = epilogue_store(tiled_mma, shared.epilogue, self.dtype, thread, consumer, self.epi_stages)
        coordinates = cute.make_identity_tensor((WARPGROUP_M, self.columns))
        return store, store.retile(tiled_mma.get_slice(thread).partition_C(coordinates))

    def producer_arrivals(self):
        """Count the arrivals that fill a stage: TMA's announcement, gathering threads, decoding warps."""
        return 1 + (32 * self.gather_warps if self.gather else 0) + self.decoding_warps


@cute.jit
def add_bias(
    values,
    coordinates,
    start: cutlass.Constexpr,
    count: cutlass.Constexpr,
    bias: cute.Tensor,
    expert: Int32,
    first: Int32,
    end: Int32,
):
    """Add a bias: values[start .. start + count] += bias[expert, first + column], nothing past column `end` of the
    bias."""
    for v in cutlass.range_constexpr(start, start + count):
        if const_expr(v // 2 % 2 == 0):  # the next two are of the same columns, eight rows below
            column = first + coordinates[v][1]
            if column < end:
                value = bias[expert, column].to(Float32)
                values[v] += value
                values[v + 2] += value
