"""What grouped GEMMs share whose rows are sorted by expert.

One work item is a tile of 128 rows of one expert (of a tall product up to 192, in a last wave of the others 64) times a
tile of columns; a group of row tiles passes over all columns together, so that both operands of the tiles in flight stay
in L2. Rows past an expert's end are computed from whatever lies there and clipped by the ragged TMA store; a half of the
tile without rows is neither loaded nor multiplied.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from .configs import Tile
from .core import (
    CHUNK,
    DEPTH,
    HALF,
    PIECE,
    ROWS,
    advance,
    gather_chunk,
    load_atom,
    one_stage,
    operand_layout,
    partition,
    piece_store,
    ragged,
    ragged_halves,
)
from .multiply import consumer_mma, narrower
from .work import NONE_LEFT, place

TAKEN = -2  # for an expert: the rows belong to the tile before
GATHER_ROWS = 4  # copied at a time by the producer's warp, 128 bytes of each


class RowsKernel:
    """Shared by the kernels over sorted rows: sources, weights, the producer, the order of work items.

    columns: of the product's tile; a last one that is narrower is multiplied by narrower instructions, unless gated.
    gather: rows of the source are named by `token`. gated: the weight's 2I rows are two halves, and a tile takes
    columns / 2 of each.
    """

    group = 8  # row tiles that pass over all columns together
    gather_warps = 1  # of the producer warpgroup, copying rows; the first of them issues TMA too

    def __init__(self, dtype, tile: Tile, gather: bool, gated: bool = False):
        self.dtype = dtype
        self.columns, self.stages, self.rows, self.dealt = tile
        self.gather = gather
        self.halves = 2 if gated else 1
        self.pieces = self.buffers = self.columns // PIECE

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
        self.layout_a = operand_layout(self.dtype, self.rows, True, self.stages)
        self.layout_b = operand_layout(self.dtype, self.columns, k_major, self.stages)
        half_b = operand_layout(self.dtype, self.columns // self.halves, k_major, self.stages)
        self.tiled_mma = consumer_mma(self.dtype, True, k_major, self.columns)
        narrow = self.halves == 1 and self.rows == ROWS  # else what it saves is not worth the registers
        self.last_columns = narrower(per_half, self.columns) if const_expr(narrow) else 0
        self.narrow_mma = None
        if const_expr(self.last_columns):
            self.narrow_mma = consumer_mma(self.dtype, True, k_major, self.last_columns)
        if const_expr(self.gather):
            atom_a, tensor_a = None, source
        else:
            half_a = operand_layout(self.dtype, HALF, True, self.stages)
            atom_a, tensor_a = load_atom(source, one_stage(half_a), (HALF, DEPTH))
        atom_b, tensor_b = load_atom(view, one_stage(half_b), (self.columns // self.halves, DEPTH))
        return atom_a, tensor_a, atom_b, tensor_b

    def whole_items(self, tiles):
        """(how many work items are whole tiles, how many more are cut into the halves of their rows): those of a last
        wave that most blocks would else have no part of, where rows are gathered."""
        items, blocks = tiles.shape[0] * self.column_tiles, cute.arch.grid_dim()[0]
        over = items % blocks
        cut = over * Int32(2 * over <= blocks) if const_expr(self.gather) else Int32(0)
        return items - cut, cut

    def num_items(self, tiles):
        whole, cut = self.whole_items(tiles)
        return whole + 2 * cut

    @cute.jit
    def find(self, tiles: cute.Tensor, number: Int32):
        """The work item of a number, which may be -1; as an Item's fields."""
        expert, first, end, column_tile = NONE_LEFT
        if number >= 0:
            if const_expr(self.gather):
                whole, _ = self.whole_items(tiles)
                half = number - whole  # of those that are cut
                number -= cutlass.max(half + 1, 0) // 2
            row_tile, column_tile = place(number, tiles.shape[0], self.column_tiles, self.group)
            expert, first, end = tiles[row_tile, 0], tiles[row_tile, 1], tiles[row_tile, 2]
            if const_expr(self.gather):
                if half >= 0:
                    first = cutlass.min(first + half % 2 * HALF, end)
                    end = cutlass.min(first + HALF, end)
            if const_expr(self.rows > ROWS):
                if end - first == ROWS and row_tile + 1 < tiles.shape[0]:
                    if tiles[row_tile + 1, 0] == expert and tiles[row_tile + 1, 2] - end <= HALF:
                        end = tiles[row_tile + 1, 2]
                if end - first <= HALF and row_tile > 0:
                    if tiles[row_tile - 1, 0] == expert and first - tiles[row_tile - 1, 1] == ROWS:
                        expert = Int32(TAKEN)
        return expert, first, end, column_tile

    @cute.jit
    def find_untaken(self, tiles: cute.Tensor, work: cutlass.Constexpr, number: Int32):
        """`find`, and where the item belongs to another, that of the next number claimed."""
        expert, first, end, column_tile = self.find(tiles, number)
        if const_expr(self.rows > ROWS):
            while expert == TAKEN:
                expert, first, end, column_tile = self.find(tiles, work.claimed(work.claim()))
        return expert, first, end, column_tile

    @cute.jit
    def produce(
        self, atom_a, tensor_a, atom_b, tensor_b, shared: cutlass.Constexpr, token: cute.Tensor, tiles: cute.Tensor
    ):
        """The producer warps' part: fill the ring for every work item of this block.

        The next item is found, and its rows are looked up, while stages of this one are waited for; what is loaded for
        that is used a stage later at the earliest, so that nothing waits for it.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        work, full, empty = shared.work, shared.ring.full, shared.ring.empty
        bytes_b = self.columns * DEPTH * 2
        bytes_a = ROWS * DEPTH * 2
        half_columns = self.columns // self.halves
        chunk, lane_row = lane % 8, lane // 8
        together = self.gather_warps * GATHER_ROWS  # rows copied at a time
        passes = ROWS // together
        top_row = warp * GATHER_ROWS + lane_row
        # rows come back to the same place in the swizzle after eight
        targets_of_stage_0 = [
            shared.a.iterator.toint() + (top_row + skip) * (DEPTH * 2) + (chunk ^ (top_row + skip) % 8) * 16
            for skip in range(0, 8, together)
        ]
        tokens, offsets = cute.make_rmem_tensor(passes, Int32), cute.make_rmem_tensor(passes, Uint32)
        number = work.first()
        expert, first, end, column_tile = self.find_untaken(tiles, work, number)
        work.hand_round(warp, (expert, first, end, column_tile), Int32(0))
        if const_expr(self.gather):
            look_up(tokens, token, first + top_row, end, together)
        stage, phase, turn = Int32(0), Int32(1), Int32(1)
        while expert >= 0:
            if warp == 0:
                number = work.claim_or_deal(number, turn)
            next_expert, next_first, next_end, next_tile = NONE_LEFT
            has_bottom = first + HALF < end
            loaded = Int32(bytes_b)  # by TMA in a stage
            if const_expr(self.gather):
                for i in cutlass.range_constexpr(passes):  # bytes from the first element of the source
                    offsets[i] = (tokens[i] * tensor_a.shape[1] + chunk * CHUNK).to(Uint32) * 2
            else:
                rows_a = cute.domain_offset((first, 0), tensor_a)
                halves = [
                    partition(
                        atom_a,
                        cute.local_tile(shared.a, (HALF, DEPTH), (half, 0, None)),
                        cute.local_tile(rows_a, (HALF, DEPTH), (half, None)),
                    )
                    for half in range(self.rows // HALF)
                ]
                loaded += bytes_a // 2 * (1 + Int32(has_bottom))
                if const_expr(self.rows > ROWS):
                    loaded += bytes_a // 2 * Int32(first + ROWS < end)
            for depth in cutlass.range(self.depth_tiles, unroll=1):
                if warp == 0:
                    if depth == self.depth_tiles // 2:
                        next_expert, next_first, next_end, next_tile = self.find_untaken(
                            tiles, work, work.claimed(number)
                        )
                if depth == self.depth_tiles - 1:
                    next_item = next_expert, next_first, next_end, next_tile
                    next_expert, next_first, next_end, next_tile = work.hand_round(warp, next_item, turn)
                    turn += 1
                    if const_expr(self.gather):
                        look_up(tokens, token, next_first + top_row, next_end, together)
                cute.arch.mbarrier_wait(empty + stage, phase)
                if warp == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, loaded)
                    for half in cutlass.range_constexpr(self.halves):
                        box = cute.local_tile(
                            tensor_b[None, None, half, expert], (half_columns, DEPTH), (column_tile, depth)
                        )
                        slot = cute.local_tile(shared.b[None, None, stage], (half_columns, DEPTH), (half, 0))
                        to_b, from_b = partition(atom_b, slot, box)
                        cute.copy(atom_b, from_b, to_b, tma_bar_ptr=full + stage)
                if const_expr(self.gather):
                    source, size = tensor_a.iterator.toint() + Int64(depth * (DEPTH * 2)), None
                    if const_expr(tensor_a.shape[1] % DEPTH):
                        # columns past the last are zero, as the weight is there: infinity times that would be NaN
                        past = (depth * DEPTH + (chunk + 1) * CHUNK - tensor_a.shape[1]) * 2
                        source -= Int64(cutlass.max(past, 0))
                        size = 16 * Int32(past <= 0)
                    targets = [t + stage * bytes_a for t in targets_of_stage_0]
                    for i in cutlass.range_constexpr(passes // 2):
                        gather_chunk(target_of(targets, i, together), source + offsets[i].to(Int64), size)
                    if has_bottom:
                        for i in cutlass.range_constexpr(passes // 2, passes):
                            gather_chunk(target_of(targets, i, together), source + offsets[i].to(Int64), size)
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                else:
                    (to_top, from_top), *others = halves
                    cute.copy(atom_a, from_top[None, depth], to_top[None, stage], tma_bar_ptr=full + stage)
                    for half, (to_half, from_half) in enumerate(others):
                        if first + HALF * (half + 1) < end:
                            cute.copy(atom_a, from_half[None, depth], to_half[None, stage], tma_bar_ptr=full + stage)
                stage, phase = advance(stage, phase, self.stages)
            expert, first, end, column_tile = next_expert, next_first, next_end, next_tile

    def store_of(self, tiled_mma, shared, own):
        """A consumer's store, and the (row, column) of every value of its accumulators."""
        thread = cute.arch.thread_idx()[0] % 128
        store = piece_store(tiled_mma, shared.pieces, self.dtype, thread, own, self.buffers)
        of_tile = cute.make_identity_tensor((HALF, self.columns))
        return store, store.retile(tiled_mma.get_slice(thread).partition_C(of_tile))

    def producer_arrivals(self):
        return 1 + (32 * self.gather_warps if self.gather else 0)


@cute.jit
def look_up(tokens, token: cute.Tensor, first: Int32, end: Int32, together: cutlass.Constexpr):
    """tokens: of every `together`-th row from `first`, a thread's own; past the end the last row is repeated."""
    for i in cutlass.range_constexpr(cute.size(tokens)):
        tokens[i] = token[cutlass.max(cutlass.min(first + together * i, end - 1), 0)]


def target_of(targets, i: int, together: int):
    """Where the i-th pass over `together` rows copies to; `targets` are those until rows come back to the same place."""
    lap, place = divmod(i, len(targets))
    return targets[place] + lap * (len(targets) * together * DEPTH * 2)


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


def table_and_counter(table, last):
    """(the tiles there are [n, 3], the counter of claimed items) of Rows.tiles, whose row `last` holds counter and n."""
    tiles = cute.make_tensor(table.iterator, cute.make_layout((table[last, 1], 3), stride=(3, 1)))
    return tiles, table.iterator + last * 3


def ragged_h(h, interleaved: bool):
    """h for stores by TMA, a piece of gate, of up, or of both at a time."""
    return ragged(h) if interleaved else ragged_halves(h)
