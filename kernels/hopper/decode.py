"""Grouped GEMMs whose weight stays packed in memory, and is decoded where the tile is loaded.

    up      h[r] = x[token[r]] @ gate_up[e]^T, a[r] = act(h[r])
    down    out[r] = source[r] @ weight[e]^T, and its backward

These are the kernels of gemm_up.py, gemm_down.py and gemm_down_backward.py with another producer of B. Where those load
a stage of a 16-bit weight by TMA, a fourth warpgroup, the decoding warps, loads the stage's codes from global memory into
registers, one stage ahead, and writes their values into B's shared memory, in TMA's layout. All else is the base class's.

    warp role         waits for                                signals (arrive count)
    decoding warps    empty[s]; scheduler.full                 full[s] (1 a warp); scheduler.empty (1 a warp)

A stage of B is a slab of shared memory for every 64 columns n of the tile, and a slab is 64 rows of 128 bytes. The 64
values of such a row lie along the dimension in which the weight's codes are contiguous:

    the weight is stored as           a row of the slab is    its 64 values are
    [E, N, K]                         one column n            the stage's 64 k
    [E, K, N], and read `across`      one k of the stage      the slab's 64 n

A decoding thread has half of one row of every slab: a segment of 32 codes, which share a scale (decoders.py).
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from .config import SLAB_BYTES, SLAB_COLUMNS, TILE_K, VECTOR, PackedKind, Tile
from .decoders import SEGMENT, SEGMENT_WORDS, PackedTensors, decoder_of
from .gemm_common import advance, shared_vector
from .gemm_down import CooperativeGemmDownKernel
from .gemm_down_backward import GemmDownBackwardKernel
from .gemm_up import GemmUpKernel
from .mainloop import consumer_mma

DECODING_WARPS = 4
# Columns of one wgmma. A thread of a block of 512 starts with 128 registers, as many as an accumulator of 256 columns
# has; wider tiles are two instructions.
MAX_MMA_COLUMNS = 192


@dataclass(frozen=True)
class DecodedOperand:
    """A packed weight, with the shape and stride of the [E, N, K] that a kernel multiplies; of the strides the one along
    K is 1 where codes are contiguous along K. across: as of DecodingKernel."""

    packed: PackedTensors
    across: bool

    @property
    def shape(self):
        experts, rows, words = self.packed.words.shape
        return (experts, 8 * words, rows) if self.across else (experts, rows, 8 * words)

    @property
    def stride(self):
        return None, None, 8 if self.across else 1


class DecodingKernel:
    """Mixed into a kernel with epilogue warps, whose B is decoded from a DecodedOperand.

    registers: of a thread in warpgroup 0, in the two consumers, and in the decoding warps; a multiprocessor has 512 for
    four threads, one of each warpgroup. decoder: of decoders.py. across: the weight is stored as [E, K, N], with codes
    contiguous along N, and not as [E, N, K].
    """

    across: bool

    threads = 512  # four warpgroups
    decoding_warps = DECODING_WARPS
    weight_bytes = 0  # TMA brings A alone

    def weight_atom(self, weight):
        """Make the TMA loads of an adapter's factor; a packed weight has none."""
        if isinstance(weight, DecodedOperand):
            return None, weight.packed
        return super().weight_atom(weight)

    def set_up_operands(self, source, weight):
        """Set up the operands as the base does, with an MMA of the columns that one instruction may have."""
        operands = super().set_up_operands(source, weight)
        columns = self.columns if self.columns <= MAX_MMA_COLUMNS else self.columns // 2
        self.tiled_mma = consumer_mma(self.dtype, True, not self.across, columns)
        self.narrow_mma, self.last_columns = None, 0  # the last tile is decoded whole, and multiplied whole
        return operands

    def load_b(self, atom_b, *arguments):
        """Issue the TMA loads of a stage of an adapter's factor; the weight's stages come from the decoding warps."""
        if atom_b is not None:
            super().load_b(atom_b, *arguments)

    @cute.jit
    def run_behind_producers(
        self, warpgroup, operands: cutlass.Constexpr, shared: cutlass.Constexpr, mma: cutlass.Constexpr, bias
    ):
        """Run the consumers, warpgroups 1 and 2, and the decoding warps, warpgroup 3."""
        if warpgroup == 3:
            cute.arch.setmaxregister_decrease(self.registers[2])
            self.run_decoding_warp(operands.b, shared)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.run_consumer(mma, shared, bias)

    @cute.jit
    def run_decoding_warp(self, packed: cutlass.Constexpr, shared: cutlass.Constexpr):
        """Run a decoding warp: fill B of every stage of every work tile, except the stages of an adapter, at which it
        only arrives.

        The next stage's codes and scales are loaded before this one is waited for. Codes have registers of their own for
        that; a stage's raw scales are made into scales first, and free theirs.
        """
        shared.arrivals.begin("decoding warps", DECODING_WARPS)
        full, empty = shared.pipeline.full, shared.pipeline.empty
        slabs = self.columns // SLAB_COLUMNS
        words, next_words = (cute.make_rmem_tensor((SEGMENT_WORDS, slabs), Int32) for _ in range(2))
        raw_scales = cute.make_rmem_tensor((self.decoder.raw_registers, slabs), Int32)
        scales = cute.make_rmem_tensor((self.decoder.scale_registers, slabs), Int32)
        constants = self.decoder.load_constants(packed)
        expert, _, _, column_tile = shared.scheduler.receive(Int32(0))
        self.load_codes(words, raw_scales, packed, expert, column_tile, Int32(0))
        stage, phase, tile_count = Int32(0), Int32(1), Int32(1)
        while expert >= 0:
            next_expert, next_column_tile = Int32(-1), Int32(0)
            for k_tile in cutlass.range(self.k_tiles, unroll=1):
                next_k_tile = k_tile + 1
                load_expert, load_column_tile = expert, column_tile
                if k_tile == self.k_tiles - 1:
                    work_tile = shared.scheduler.receive(tile_count)
                    next_expert, next_column_tile = work_tile.expert, work_tile.tile
                    load_expert, load_column_tile, next_k_tile = next_expert, next_column_tile, Int32(0)
                self.make_scales(scales, raw_scales, packed, constants)
                self.load_codes(next_words, raw_scales, packed, load_expert, load_column_tile, next_k_tile)
                cute.arch.mbarrier_wait(empty + stage, phase)
                self.decode_stage(words, scales, shared, stage)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                shared.arrivals.arrive("full", full, stage)
                for i in cutlass.range_constexpr(cute.size(words)):
                    words[i] = next_words[i]
                stage, phase = advance(stage, phase, self.stages)
            for _ in cutlass.range(self.lora_k_tiles, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                shared.arrivals.arrive("full", full, stage)
                stage, phase = advance(stage, phase, self.stages)
            tile_count += 1
            expert, column_tile = next_expert, next_column_tile

    def own_half_row(self):
        """Compute the row of a slab of which this thread has a half, and which half, 0 or 1."""
        thread = cute.arch.thread_idx()[0] % (32 * DECODING_WARPS)
        return thread // 2, thread % 2

    def load_codes(self, words, raw_scales, packed, expert, column_tile, k_tile):
        """Load a thread's codes of a stage, a segment a slab, and their raw scales.

        Past an end of the weight its last codes are loaded again: A is zero past the depth, and products past the last
        column are not stored.
        """
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Int32, num_bits_per_copy=128)
        _, rows, row_words = packed.words.shape
        row_segments, (own_row, half) = row_words // SEGMENT_WORDS, self.own_half_row()
        expert = cutlass.max(expert, 0)  # -1, where there is no more work
        side_columns = self.columns // self.weight_sides
        for slab in range(self.columns // SLAB_COLUMNS):
            column = column_tile * side_columns + slab * SLAB_COLUMNS % side_columns
            if self.across:
                row, segment = k_tile * TILE_K + own_row, column // SEGMENT + half
            else:
                side, per_side = slab * SLAB_COLUMNS // side_columns, rows // self.weight_sides
                row, segment = cutlass.min(column + own_row, per_side - 1) + side * per_side, k_tile * 2 + half
            row, segment = cutlass.min(row, rows - 1), cutlass.min(segment, row_segments - 1)
            index = (Int64(expert) * rows + row) * row_segments + segment
            pointer = cute.make_ptr(
                Int32,
                (packed.words.iterator + index * SEGMENT_WORDS).toint(),
                cute.AddressSpace.gmem,
                assumed_align=16,
            )
            cute.copy(copy, cute.make_tensor(pointer, cute.make_layout(SEGMENT_WORDS)), words[None, slab])
            for i, value in enumerate(self.decoder.load_raw_scale(packed, expert, row, segment)):
                raw_scales[self.decoder.raw_registers * slab + i] = value

    def make_scales(self, scales, raw_scales, packed, constants):
        """Make the scales of a stage's segments from the raw ones that were loaded."""
        count = self.decoder.raw_registers
        for slab in range(self.columns // SLAB_COLUMNS):
            raw_scale = [raw_scales[count * slab + i] for i in range(count)]
            for i, value in enumerate(self.decoder.make_scale(packed, constants, raw_scale)):
                scales[self.decoder.scale_registers * slab + i] = value

    def decode_stage(self, words, scales, shared, stage):
        """Decode a thread's codes of a stage into B."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        values = cute.make_rmem_tensor(VECTOR, self.dtype)
        value_words, (own_row, half) = cute.recast_tensor(values, Int32), self.own_half_row()
        first, count = shared.b.iterator.toint() + stage * self.stage_bytes_b, self.decoder.scale_registers
        for slab in range(self.columns // SLAB_COLUMNS):
            codebook = self.decoder.codebook([scales[count * slab + i] for i in range(count)])
            for word in range(SEGMENT_WORDS):
                for i, bf16x2 in enumerate(self.decoder.decode(words[slab * SEGMENT_WORDS + word], codebook)):
                    value_words[i] = bf16x2
                target = shared_vector(self.dtype, first + slab * SLAB_BYTES, own_row, half * SEGMENT_WORDS + word)
                cute.copy(copy, values, target)


class DecodedGemmUpKernel(DecodingKernel, GemmUpKernel):
    """GemmUpKernel of a packed gate_up, [E, 2I, H]."""

    registers = 88, 168, 88
    across = False

    def __init__(self, kind: PackedKind, tile: Tile, activation, interleaved: bool):
        super().__init__(BFloat16, tile, activation, interleaved)
        self.decoder = decoder_of(kind)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        words: cute.Tensor,
        scales: cute.Tensor,
        state,
        bias,
        shrunk,
        factor,
        h,
        a,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        weight = DecodedOperand(PackedTensors(words, scales, state), self.across)
        GemmUpKernel.__call__(
            self, x, weight, bias, shrunk, factor, h, a, token, tile_table, state_row, num_blocks, stream
        )


class DecodedGemmDownKernel(DecodingKernel, CooperativeGemmDownKernel):
    """CooperativeGemmDownKernel of a packed weight: down [E, H, I], or gate_up [E, 2I, H] read across."""

    registers = 40, 184, 104

    def __init__(self, kind: PackedKind, tile: Tile, across: bool):
        super().__init__(BFloat16, tile)
        self.decoder, self.across = decoder_of(kind), across

    @cute.jit
    def __call__(
        self,
        source: cute.Tensor,
        words: cute.Tensor,
        scales: cute.Tensor,
        state,
        bias,
        shrunk,
        factor,
        out: cute.Tensor,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        weight = DecodedOperand(PackedTensors(words, scales, state), self.across)
        CooperativeGemmDownKernel.__call__(
            self, source, weight, bias, shrunk, factor, out, token, tile_table, state_row, num_blocks, stream
        )


class DecodedGemmDownBackwardKernel(DecodingKernel, GemmDownBackwardKernel):
    """GemmDownBackwardKernel of a packed down [E, H, I], read across."""

    registers = 120, 144, 104
    across = True

    def __init__(self, kind: PackedKind, tile: Tile, activation, interleaved: bool):
        super().__init__(BFloat16, tile, activation, interleaved)
        self.decoder = decoder_of(kind)

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        words: cute.Tensor,
        scales: cute.Tensor,
        state,
        shrunk,
        factor,
        h: cute.Tensor,
        routing_weight: cute.Tensor,
        dh,
        a,
        partials,
        pair: cute.Tensor,
        token: cute.Tensor,
        tile_table: cute.Tensor,
        state_row: Int32,
        num_blocks: Int32,
        stream: cuda.CUstream,
    ):
        weight = DecodedOperand(PackedTensors(words, scales, state), self.across)
        GemmDownBackwardKernel.__call__(
            self,
            dout,
            weight,
            shrunk,
            factor,
            h,
            routing_weight,
            dh,
            a,
            partials,
            pair,
            token,
            tile_table,
            state_row,
            num_blocks,
            stream,
        )
