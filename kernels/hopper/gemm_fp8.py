"""up and down with e4m3 operands, scaled by groups.

    h[r] = x[token[r]] @ gate_up[e]^T, a[r] = act(h[r])        out[r] = a[r] @ down[e]^T

An operand's K columns are cut into groups of 128. A scale belongs to a group of one row of x or a, and to a block of 128
rows and 128 columns of a weight, whose blocks count gate's and up's rows apart. The tensor cores add fp8 products with
fewer bits than fp32, so a group is summed apart in wgmma's accumulators, and added to fp32 registers times both scales
(two-level accumulation: arXiv 2412.19437, section 3.3.2).

The producer sees two e4m3 values as one of 16 bits (PTX's e4m3x2), of which a stage of the pipeline has TILE_K, one
group; only the consumers see fp8. A consumer computes its 64 rows of a stage in two waves of 128 columns: in `up` these
are gate and up, each of which lies in one block of the weight. While it adds a wave to its sums, the other one
multiplies.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..minifloat import E4M3_MAX
from ..scaled import SMALLEST
from .activations import activate
from .arrivals import Arrivals
from .config import CONSUMER_WARPS, EPI_TILE_N, K_BLOCK, THREADS, TILE_K, VECTOR, WARPGROUP_M, Tile
from .epilogue import EpilogueWarpsKernel
from .gemm_common import (
    Layouts,
    Operands,
    TmaStore,
    advance,
    epilogue_store,
    global_vector,
    major_mode,
    one_stage,
    storage,
    tma_store,
)
from .mainloop import MainloopParams, consumer_mma, issue
from .ptx import pack_e4m3x4
from .varlen import varlen_halves, varlen_rows

FP8 = cutlass.Float8E4M3FN
BF16 = cutlass.BFloat16  # dtype of h, out and an adapter, and as which the producer sees two e4m3 values (e4m3x2)
GROUP = 128  # columns that share a scale, and rows of a weight's block
WAVE = 128  # columns of a tile that a consumer computes at a time
TILE = Tile(2 * WAVE, 3)


@dataclass(frozen=True)
class GroupMma:
    """The MMAs of a wave: of a group, and of an adapter, in 16 bits."""

    group: cute.TiledMma
    lora: cute.TiledMma


@dataclass(frozen=True)
class GroupScales:
    """Scales of a product. rows [T or R, K / 128]: those of the rows of A, which `token` names where rows are gathered;
    weight [E, blocks of rows, K / 128]."""

    rows: cute.Tensor
    weight: cute.Tensor
    token: cute.Tensor


@dataclass(frozen=True)
class QuantizedRows:
    """Tensors for rows that a kernel quantizes: values [R, I / 2] in e4m3x2, scales [R, I / 128]; and the rows before
    that in bf16, `whole` [R, I], or None."""

    values: cute.Tensor
    scales: cute.Tensor
    whole: cute.Tensor | None


def quantize_group(packed, values, smallest: float):
    """Quantize a group, of which each of eight threads has 16 values in fp32, into the registers `packed`. Return the
    group's scale."""
    largest = Float32(smallest)
    for value in values:
        largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
    for mask in (1, 2, 4):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, mask))
    inverse = E4M3_MAX * cute.arch.rcp_approx(largest)
    words = cute.recast_tensor(packed, Int32)
    for word in range(len(values) // 4):
        words[word] = pack_e4m3x4(*(value * inverse for value in values[4 * word : 4 * word + 4]))
    return largest * (1 / E4M3_MAX)


def group_layout(extent: int, stages: int):
    """Lay out the swizzled shared memory of an operand as fp8: (extent, GROUP, stages)."""
    atom = warpgroup.make_smem_layout_atom(sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, FP8, GROUP), FP8)
    return cute.tile_to_shape(atom, (extent, GROUP, stages), order=(0, 1, 2))


def wave_fragments(mma, a, b, half):
    """Make a consumer's operands: A, and B of every wave."""
    thread_mma, depth = mma.get_slice(0), cute.size(a, mode=[1])
    fragment_a = mma.make_fragment_A(thread_mma.partition_A(cute.local_tile(a, (WARPGROUP_M, depth), (half, 0, None))))
    fragments_b = [
        mma.make_fragment_B(thread_mma.partition_B(cute.local_tile(b, (WAVE, depth), (wave, 0, None))))
        for wave in range(cute.size(b, mode=[0]) // WAVE)
    ]
    return fragment_a, fragments_b


def as_fp8(tensor, layout):
    """View an operand's shared memory as the e4m3 values that it holds."""
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner, FP8), layout.outer)


@dataclass(frozen=True)
class Turns:
    """The turn barriers, as one consumer sees them. A stage has two waves, so a wave meets the same phase in every
    stage."""

    barriers: cute.Pointer
    consumer: Int32
    arrivals: Arrivals

    def wait(self, wave: int):
        """Wait until the other consumer has issued its wave before; the very first of consumer 0 waits for none."""
        cute.arch.mbarrier_wait(self.barriers + self.consumer, (wave + 1 - self.consumer) % 2)

    def pass_on(self):
        """Let the other consumer issue its next wave, once this one's is issued."""
        self.arrivals.arrive("turn", self.barriers + 1 - self.consumer, groups=2)


class GroupScaledKernel(EpilogueWarpsKernel):
    """Base of the FP8 GEMMs: consumers that scale groups. Operands are e4m3x2.

    Where `in_turns`, two more extra barriers, `turn[c]`, make the consumers issue their waves in turn, so that one adds
    to its sums while the other multiplies:

        barrier    arrivals   signalled by                                 waited for by
        turn[c]    4          consumer 1 - c's warps, a wave issued        consumer c, before it issues one
    """

    in_turns = False  # measured: faster for up, slower for down

    def set_up_epilogue(self, computed_with: bool = False):
        super().set_up_epilogue(computed_with)
        if self.in_turns:
            self.extra_arrivals["turn"] = CONSUMER_WARPS // 2
            self.Storage = storage(self.dtype, self.layouts, self.stages, 6)

    def set_up_operands(self, source, weight) -> Operands:
        operands = super().set_up_operands(source, weight)
        self.narrow_mma, self.last_columns = None, 0
        return operands

    def half_tile_params(self, pipeline, stage, phase, has_rows) -> MainloopParams:
        """Make the arguments of `multiply_groups` for half a tile, whose stages are released unread unless it
        `has_rows`."""
        k_tiles = has_rows * self.k_tiles
        return MainloopParams(pipeline, stage, phase, k_tiles=k_tiles, unused=self.k_tiles - k_tiles)

    @property
    def lora_k_blocks(self) -> int:
        """Count the k blocks of each stage of an adapter that are multiplied: those that the rank fills, or where there
        are several stages all, which TMA fills with zeros past the rank."""
        return self.tail_k_blocks if self.whole_k_tiles == self.k_tiles else TILE_K // K_BLOCK

    @property
    def mma(self) -> GroupMma:
        group = sm90.make_trivial_tiled_mma(
            FP8, FP8, major_mode(True), major_mode(True), Float32, (1, 1, 1), tiler_mn=(WARPGROUP_M, WAVE)
        )
        return GroupMma(group, consumer_mma(BF16, True, True, WAVE))

    def rows_of_scales(self, scales, row, end):
        """Find where GroupScales.rows has the scales of a thread's two rows of the tile, `row` and eight below; past
        the end those of the last row."""
        rows = [cutlass.max(cutlass.min(row + i, end - 1), 0) for i in (0, 8)]
        return [scales.token[row] for row in rows] if self.gather else rows

    def weight_block(self, wave, column_tile, blocks: int):
        """Compute the index of the weight's block of rows that a wave of the tile multiplies."""
        if self.weight_sides == 2:
            return column_tile + wave * (blocks // 2)
        return cutlass.min(2 * column_tile + wave, blocks - 1)

    @cute.jit
    def run_consumer(self, mma: cutlass.Constexpr, shared: cutlass.Constexpr, scales: cutlass.Constexpr):
        """Run a consumer: write its half of every tile of the product into shared memory."""
        shared.arrivals.begin("consumers", CONSUMER_WARPS)
        half = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        thread = cute.arch.thread_idx()[0] % 128
        own_row = WARPGROUP_M * half + thread // 32 * 16 + thread % 32 // 4
        tile_full, tile_empty = shared.extra_barriers + half, shared.extra_barriers + 2 + half
        mma.group.set(warpgroup.Field.ACCUMULATE, True)
        mma.lora.set(warpgroup.Field.ACCUMULATE, True)
        a = as_fp8(shared.a, group_layout(self.rows, self.stages))
        b = as_fp8(shared.b, group_layout(self.columns, self.stages))
        fragments = wave_fragments(mma.group, a, b, half)
        lora_fragments = wave_fragments(mma.lora, shared.a, shared.b, half)
        shape = mma.group.partition_shape_C((WARPGROUP_M, WAVE))
        partial = cute.make_rmem_tensor(shape, Float32)
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in fragments[1]]
        store = epilogue_store(mma.group, shared.epilogue, self.dtype, thread, half, self.epi_stages)
        values = [store.retile(one) for one in sums]
        per_wave = WAVE // EPI_TILE_N
        turns = Turns(shared.extra_barriers + 4, half, shared.arrivals) if self.in_turns else None
        stage, phase, empty_phase = Int32(0), Int32(0), Int32(1)
        expert, first, end, column_tile = shared.scheduler.receive(Int32(0))
        top_row, bottom_row = self.rows_of_scales(scales, first + own_row, end)
        tile_count = Int32(1)
        while expert >= 0:
            has_rows = Int32(first + WARPGROUP_M * half < end)
            block = self.weight_block(thread % 2, column_tile, scales.weight.shape[1])
            params = self.half_tile_params(shared.pipeline, stage, phase, has_rows)
            stage, phase = multiply_groups(
                mma.group,
                sums,
                partial,
                fragments,
                (scales.rows[top_row, None], scales.rows[bottom_row, None], scales.weight[expert, block, None]),
                params,
                turns,
            )
            stage, phase = release_unread(shared.pipeline, stage, phase, params.unused, len(sums), turns)
            for _ in cutlass.range(self.lora_k_tiles, unroll=1):  # without rows too: in a branch ptxas spills
                stage, phase = add_lora(
                    mma.lora,
                    sums,
                    partial,
                    lora_fragments,
                    self.lora_k_blocks,
                    shared.pipeline,
                    stage,
                    phase,
                    turns,
                )
            expert, first, end, column_tile = shared.scheduler.receive(tile_count)
            tile_count += 1
            top_row, bottom_row = self.rows_of_scales(scales, first + own_row, end)
            cute.arch.mbarrier_wait(tile_empty, empty_phase)
            empty_phase ^= 1
            for i in cutlass.range_constexpr(self.epi_tiles):
                store.write(i, lambda v, i=i: values[i // per_wave][i % per_wave * store.size + v])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            shared.arrivals.arrive("tile_full", tile_full, groups=2)


@cute.jit
def multiply_wave(
    mma: cutlass.Constexpr,
    partial,
    fragments: cutlass.Constexpr,
    k_blocks: cutlass.Constexpr,
    wave: cutlass.Constexpr,
    stage: Int32,
    turns: cutlass.Constexpr,
):
    """Compute partial = A B^T of a wave's columns over the first `k_blocks` of a stage, in this consumer's turn."""
    fragment_a, fragments_b = fragments
    if const_expr(turns is not None):
        turns.wait(wave)
    warpgroup.fence()
    for k_block in cutlass.range_constexpr(k_blocks):
        mma.set(warpgroup.Field.ACCUMULATE, k_block > 0)
        issue(mma, (partial,), (fragment_a,), fragments_b[wave], k_block, stage)
    warpgroup.commit_group()
    if const_expr(turns is not None):
        turns.pass_on()
    warpgroup.wait_group(0)


@cute.jit
def multiply_groups(
    mma: cutlass.Constexpr,
    sums,
    partial,
    fragments: cutlass.Constexpr,
    scales: cutlass.Constexpr,
    params: cutlass.Constexpr,
    turns: cutlass.Constexpr,
):
    """Compute sums[wave], the product of a wave's columns: the sum over stages, each of which is a group, of A B^T times
    the scales of the rows and of the weight. Returns the pipeline's next stage and phase.

    scales: by group, those of a thread's two rows, and one of the weight's: the first wave's in even threads, the
    second's in odd ones, which exchange them by a shuffle. (If every thread loaded both, ptxas would see that they are
    the same in a warp, and wait for them at once to have them in uniform registers.) The next group's scales are loaded
    while this group is multiplied."""
    pipeline, stage, phase = params.pipeline, params.stage, params.phase
    k_blocks = cute.size(fragments[0], mode=[2])
    is_odd = cute.arch.thread_idx()[0] % 2 == 1
    for wave in cutlass.range_constexpr(len(sums)):
        sums[wave].fill(0.0)
    top, bottom, own = [by_group[0] for by_group in scales]
    for k_tile in cutlass.range(params.k_tiles, unroll=1):
        other = cute.arch.shuffle_sync_bfly(own, 1)
        left, right = cutlass.select_(is_odd, other, own), cutlass.select_(is_odd, own, other)
        products = (top * left, bottom * left), (top * right, bottom * right)
        pipeline.wait_full(stage, phase)
        group = cutlass.min(k_tile + 1, scales[0].shape[0] - 1)
        top, bottom, own = [by_group[group] for by_group in scales]
        for wave in cutlass.range_constexpr(len(sums)):
            multiply_wave(mma, partial, fragments, k_blocks, wave, stage, turns)
            if const_expr(wave == len(sums) - 1):
                pipeline.release(stage)
            for v in cutlass.range_constexpr(cute.size(partial)):
                sums[wave][v] += products[wave][v // 2 % 2] * partial[v]
        stage, phase = advance(stage, phase, pipeline.stages)
    return stage, phase


@cute.jit
def add_lora(
    mma: cutlass.Constexpr,
    sums,
    partial,
    fragments: cutlass.Constexpr,
    k_blocks: cutlass.Constexpr,
    pipeline: cutlass.Constexpr,
    stage: Int32,
    phase: Int32,
    turns: cutlass.Constexpr,
):
    """Add the product of an adapter's stage, the first `k_blocks` of it in bf16, to `sums`. Returns the next stage and
    phase."""
    pipeline.wait_full(stage, phase)
    for wave in cutlass.range_constexpr(len(sums)):
        multiply_wave(mma, partial, fragments, k_blocks, wave, stage, turns)
        for v in cutlass.range_constexpr(cute.size(partial)):
            sums[wave][v] += partial[v]
    pipeline.release(stage)
    return advance(stage, phase, pipeline.stages)


@cute.jit
def release_unread(
    pipeline: cutlass.Constexpr,
    stage: Int32,
    phase: Int32,
    stages: Int32,
    waves: cutlass.Constexpr,
    turns: cutlass.Constexpr,
):
    """Release the stages, and take the turns, of a half tile without rows. Return the pipeline's next stage and phase."""
    for _ in cutlass.range(stages, unroll=1):
        cute.arch.mbarrier_wait(pipeline.full + stage, phase)
        pipeline.release(stage)
        for wave in cutlass.range_constexpr(waves):
            if const_expr(turns is not None):
                turns.wait(wave)
                turns.pass_on()
        stage, phase = advance(stage, phase, pipeline.stages)
    return stage, phase


class GroupScaledGatherKernel(GroupScaledKernel):
    """Base of the FP8 GEMMs that gather A and whose epilogue warps compute."""

    in_turns = True
    registers = 88, 208


class GemmFp8UpKernel(GroupScaledGatherKernel):
    """GEMM of h, and a of it: x [T, H / 2] gathered, gate_up [E, 2I, H / 2], both in e4m3x2. h is stored in
    bf16, a in e4m3 with a scale for every group of 128 columns, which are those of one tile."""

    gather_warps = 2

    def __init__(self, activation):
        super().__init__(BF16, TILE, gate_then_up=True)
        self.activation = activation

    def set_up_lora(self, shrunk, factor):
        if shrunk is not None:
            self.registers = 72, 216  # with 208 ptxas spills
        return super().set_up_lora(shrunk, factor)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        gate_up: cute.Tensor,
        x_scales: cute.Tensor,
        weight_scales: cute.Tensor,
        shrunk,
        factor,
        h,
        a,
        scaled_a,
        a_scales,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        operands = self.set_up_operands(x, gate_up)
        lora = self.set_up_lora(shrunk, factor)
        self.set_up_epilogue()
        out = None
        if const_expr(h is not None):
            out = tma_store(varlen_halves(h), one_stage(self.layouts.epilogue), (WARPGROUP_M, EPI_TILE_N))
        scales = GroupScales(x_scales, weight_scales, token)
        to = None
        if const_expr(scaled_a is not None):
            to = QuantizedRows(scaled_a, a_scales, a)
        self.kernel(operands, lora, out, scales, to, token, tile_table, state_row, self.mma, self.layouts).launch(
            grid=(num_blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        lora,
        out,
        scales: GroupScales,
        to,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: GroupMma,
        layouts: Layouts,
    ):
        self.run_warps(operands, lora, token, tile_table, state_row, mma, scales, layouts, (out, to))

    @cute.jit
    def epilogue_half_tile(
        self,
        shared: cutlass.Constexpr,
        to: cutlass.Constexpr,
        first: Int32,
        end: Int32,
        column_tile: Int32,
        half: cutlass.Constexpr,
        epilogue_warp,
    ):
        """Compute and quantize a of half a tile: a warp takes four rows at a time, eight threads a row, and a thread 16
        columns."""
        lane = cute.arch.lane_idx()
        row_thread, num_values = lane % 8, 2 * VECTOR
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        gate, up = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        values = cute.make_rmem_tensor(num_values, Float32)
        packed = cute.make_rmem_tensor(VECTOR, self.dtype)
        width = to.values.shape[1]
        rows = cutlass.max(cutlass.min(end - first, WARPGROUP_M), 0)
        for unit in cutlass.range(epilogue_warp, (rows + 3) // 4, self.num_epilogue_warps, unroll=1):
            row = unit * 4 + lane // 8
            for i in cutlass.range_constexpr(2):
                vector = row_thread % 4 * 2 + i
                self.read_product(gate, shared, half, row_thread // 4, row, vector)
                self.read_product(up, shared, half, row_thread // 4 + self.epi_tiles // 2, row, vector)
                for v in cutlass.range_constexpr(VECTOR):
                    values[i * VECTOR + v] = activate(gate[v], up[v], *self.activation)[0]
            scale = quantize_group(packed, [values[v] for v in range(num_values)], SMALLEST)
            column = (column_tile * GROUP + row_thread * num_values) // 2  # of e4m3x2
            if row < rows:
                if column < width:
                    cute.copy(copy, packed, global_vector(to.values, Int64(first + row) * width + column))
                    if const_expr(to.whole is not None):
                        for i in cutlass.range_constexpr(2):
                            for v in cutlass.range_constexpr(VECTOR):
                                packed[v] = values[i * VECTOR + v].to(self.dtype)
                            offset = Int64(first + row) * (2 * width) + 2 * column + i * VECTOR
                            cute.copy(copy, packed, global_vector(to.whole, offset))
                if row_thread == 0:
                    to.scales[first + row, column_tile] = scale


class GemmFp8DownKernel(GroupScaledKernel):
    """GEMM of gemm_down in FP8: a [R, I / 2], down [E, H, I / 2], both in e4m3x2; out [R, H] in bf16."""

    registers = 40, 232

    def __init__(self):
        super().__init__(BF16, TILE, gather=False)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        down: cute.Tensor,
        a_scales: cute.Tensor,
        weight_scales: cute.Tensor,
        shrunk,
        factor,
        out: cute.Tensor,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        operands = self.set_up_operands(a, down)
        lora = self.set_up_lora(shrunk, factor)
        self.set_up_epilogue()
        stored = tma_store(varlen_rows(out), one_stage(self.layouts.epilogue), (WARPGROUP_M, EPI_TILE_N))
        scales = GroupScales(a_scales, weight_scales, token)
        self.kernel(operands, lora, stored, scales, token, tile_table, state_row, self.mma, self.layouts).launch(
            grid=(num_blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        operands: Operands,
        lora,
        out: TmaStore,
        scales: GroupScales,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        mma: GroupMma,
        layouts: Layouts,
    ):
        self.run_warps(operands, lora, token, tile_table, state_row, mma, scales, layouts, (out, None))
