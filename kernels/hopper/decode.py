"""Grouped GEMMs whose weight stays packed in memory, and is decoded where the tile is loaded.

    h[r] = x[token[r]] @ gate_up[e]^T, a[r] = act(h[r])        out[r] = source[r] @ weight[e]^T

A fourth warpgroup decodes: its warps load the codes of a stage of B from global memory into registers, one stage ahead,
and write the values in 16 bits where TMA would have put them. The rest is the kernels' for weights in 16 bits.

    warp role         waits for                                signals (arrive count)
    decoding warps    empty[s]; scheduler.full                 full[s] (1 a warp); scheduler.empty (1 a warp)

A stage of B is 64 rows of 128 bytes for every 64 columns of the tile (a block), in both storage orders: of a weight with
contiguous depth a row is a column of the tile, of one that is read across a row is a step of the depth. A thread decodes
half of one such row of every block: 32 values, which share a scale (decoders.py).
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from .config import TILE_K, VECTOR, Stored, Tile
from .decoders import GROUP, Codes, decoder_of
from .gemm_common import advance, shared_vector
from .gemm_down import CooperativeGemmDownKernel
from .gemm_down_backward import GemmDownBackwardKernel
from .gemm_up import GemmUpKernel
from .mainloop import consumer_mma

DECODING_WARPS = 4
WORDS = GROUP // 8  # of 32 bits, eight codes each
BLOCK_N = 64  # columns of B whose stage is 64 rows of 128 bytes
BLOCK_BYTES = BLOCK_N * TILE_K * 2
MAX_MMA_COLUMNS = 192  # of one wgmma: a block of 512 threads starts with 128 registers a thread


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight as [E, N, K], or where it is read `across`, as the transpose of that: its codes run along N."""

    codes: Codes
    across: bool

    @property
    def shape(self):
        experts, rows, words = self.codes.words.shape
        return (experts, 8 * words, rows) if self.across else (experts, rows, 8 * words)

    @property
    def stride(self):
        return None, None, 8 if self.across else 1


class DecodingKernel:
    """Mixed into a kernel with epilogue warps, whose B is decoded from a PackedWeight.

    registers: of a thread in warpgroup 0, in the consumers, and in the decoding warps. decoder: of decoders.py.
    """

    threads = 512
    decoding_warps = DECODING_WARPS
    weight_bytes = 0

    def weight_atom(self, weight):
        """Make the TMA loads of an adapter's factor; of a packed weight there are none."""
        if isinstance(weight, PackedWeight):
            self.across = weight.across
            return None, weight.codes
        return super().weight_atom(weight)

    def set_up_operands(self, source, weight):
        operands = super().set_up_operands(source, weight)
        columns = self.columns if self.columns <= MAX_MMA_COLUMNS else self.columns // 2
        self.tiled_mma = consumer_mma(self.dtype, True, not self.across, columns)
        self.narrow_mma, self.last_columns = None, 0
        return operands

    def load_b(self, atom_b, *arguments):
        if atom_b is not None:
            super().load_b(atom_b, *arguments)

    @cute.jit
    def run_behind_producers(
        self, warpgroup, operands: cutlass.Constexpr, shared: cutlass.Constexpr, mma: cutlass.Constexpr, bias
    ):
        """Run the consumers, and the decoding warps behind them."""
        if warpgroup == 3:
            cute.arch.setmaxregister_decrease(self.registers[2])
            self.run_decoding_warp(operands.b, shared)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.run_consumer(mma, shared, bias)

    @cute.jit
    def run_decoding_warp(self, codes: cutlass.Constexpr, shared: cutlass.Constexpr):
        """Run a decoding warp: fill B of every stage of every work tile."""
        shared.arrivals.begin("decoding warps", DECODING_WARPS)
        full, empty = shared.pipeline.full, shared.pipeline.empty
        blocks = self.columns // BLOCK_N
        words, next_words = (cute.make_rmem_tensor((WORDS, blocks), Int32) for _ in range(2))
        loaded = cute.make_rmem_tensor((self.decoder.loaded, blocks), Int32)
        prepared = cute.make_rmem_tensor((self.decoder.prepared, blocks), Int32)
        constants = self.decoder.constants(codes)
        expert, _, _, column_tile = shared.scheduler.receive(Int32(0))
        self.load_codes(words, loaded, codes, expert, column_tile, Int32(0))
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
                self.prepare(prepared, loaded, codes, constants)
                self.load_codes(next_words, loaded, codes, load_expert, load_column_tile, next_k_tile)
                cute.arch.mbarrier_wait(empty + stage, phase)
                self.decode_stage(words, prepared, shared, stage)
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

    def place(self):
        """Return a thread's row of a block, and which half of it is its own."""
        thread = cute.arch.thread_idx()[0] % (32 * DECODING_WARPS)
        return thread // 2, thread % 2

    def load_codes(self, words, loaded, codes, expert, column_tile, k_tile):
        """Load a thread's codes of a stage, and what stands beside them. Past the ends of the weight others are loaded:
        what is multiplied with them is zero, or is not stored."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Int32, num_bits_per_copy=128)
        _, rows, row_words = codes.words.shape
        units, (own_row, half) = row_words // WORDS, self.place()
        expert = cutlass.max(expert, 0)
        width = self.columns // self.halves
        for block in range(self.columns // BLOCK_N):
            column = column_tile * width + block * BLOCK_N % width
            if self.across:
                row, unit = k_tile * TILE_K + own_row, column // GROUP + half
            else:
                side, per_side = block * BLOCK_N // width, rows // self.halves
                row, unit = cutlass.min(column + own_row, per_side - 1) + side * per_side, k_tile * 2 + half
            row, unit = cutlass.min(row, rows - 1), cutlass.min(unit, units - 1)
            place = (Int64(expert) * rows + row) * units + unit
            pointer = cute.make_ptr(
                Int32, (codes.words.iterator + place * WORDS).toint(), cute.AddressSpace.gmem, assumed_align=16
            )
            cute.copy(copy, cute.make_tensor(pointer, cute.make_layout(WORDS)), words[None, block])
            for i, value in enumerate(self.decoder.load(codes, expert, row, unit)):
                loaded[self.decoder.loaded * block + i] = value

    def prepare(self, prepared, loaded, codes, constants):
        """Prepare a stage's scales, before those of the next are loaded into their registers."""
        each = self.decoder.loaded
        for block in range(self.columns // BLOCK_N):
            of_block = [loaded[each * block + i] for i in range(each)]
            for i, value in enumerate(self.decoder.prepare(codes, constants, of_block)):
                prepared[self.decoder.prepared * block + i] = value

    def decode_stage(self, words, prepared, shared, stage):
        """Decode a thread's codes of a stage into B."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=16 * VECTOR)
        values = cute.make_rmem_tensor(VECTOR, self.dtype)
        pairs, (own_row, half) = cute.recast_tensor(values, Int32), self.place()
        first, each = shared.b.iterator.toint() + stage * self.stage_bytes_b, self.decoder.prepared
        for block in range(self.columns // BLOCK_N):
            table = self.decoder.table([prepared[each * block + i] for i in range(each)])
            for word in range(WORDS):
                for i, pair in enumerate(self.decoder.pairs(words[block * WORDS + word], table)):
                    pairs[i] = pair
                target = shared_vector(self.dtype, first + block * BLOCK_BYTES, own_row, half * WORDS + word)
                cute.copy(copy, values, target)


class DecodedGemmUpKernel(DecodingKernel, GemmUpKernel):
    """GemmUpKernel of a packed gate_up, [E, 2I, H]."""

    registers = 88, 168, 88

    def __init__(self, stored: Stored, tile: Tile, activation, interleaved: bool):
        super().__init__(BFloat16, tile, activation, interleaved)
        self.decoder = decoder_of(stored)

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
        table: cute.Tensor,
        last: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        weight = PackedWeight(Codes(words, scales, state), False)
        GemmUpKernel.__call__(self, x, weight, bias, shrunk, factor, h, a, token, table, last, blocks, stream)


class DecodedGemmDownKernel(DecodingKernel, CooperativeGemmDownKernel):
    """CooperativeGemmDownKernel of a packed weight: down [E, H, I], or gate_up [E, 2I, H] read across."""

    registers = 40, 184, 104

    def __init__(self, stored: Stored, tile: Tile, across: bool):
        super().__init__(BFloat16, tile)
        self.decoder, self.across = decoder_of(stored), across

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
        table: cute.Tensor,
        last: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        weight = PackedWeight(Codes(words, scales, state), self.across)
        CooperativeGemmDownKernel.__call__(
            self, source, weight, bias, shrunk, factor, out, token, table, last, blocks, stream
        )


class DecodedGemmDownBackwardKernel(DecodingKernel, GemmDownBackwardKernel):
    """GemmDownBackwardKernel of a packed down [E, H, I], read across."""

    registers = 120, 144, 104

    def __init__(self, stored: Stored, tile: Tile, activation, interleaved: bool):
        super().__init__(BFloat16, tile, activation, interleaved)
        self.decoder = decoder_of(stored)

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
        table: cute.Tensor,
        last: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        weight = PackedWeight(Codes(words, scales, state), True)
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
            table,
            last,
            blocks,
            stream,
        )
