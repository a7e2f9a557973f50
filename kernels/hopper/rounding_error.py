"""Residuals of products rounded to bf16, for the epilogue warps: four bits a value, in shared memory beside it.

The activation is computed from the product, not from its rounding, as an epilogue in the consumers' registers would. The
epilogue warps read 16 bits a value (epilogue.py) and the four bits below them. Together they are off by at most 1.28 *
2^-11 of the value, or where they are truncated by half of that, instead of 2^-8:

    rounded     the 16 bits are the nearest bf16, which is stored as h. The four are 16 to 13 of the fp32 product: bit 16
                tells whether rounding went up.
    truncated   the 16 bits are the upper ones of the product, for what is not stored (da'). The four are 15 to 12.

Both give the product without the bits that are left out, half a step below it on average, which a factor corrects.
Infinities and NaN stay what they are. fp16 keeps 11 bits itself and needs none of this.

An epi tile has 32 bytes of residuals a row: the word of columns 32 w + 8 j + 2 q + c, j < 4, c < 2, lies at 16 w + 4
q. So a consumer's thread, which holds the columns 8 j + 2 q + c of two rows, writes whole words, and a thread of an
epilogue warp reads the four words of a vector of 8 columns at once.
"""

import math
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from .config import EPI_TILE_N, WARPGROUP_M
from .ptx import permute_bytes

ROW_BYTES = EPI_TILE_N // 2
RESIDUAL_BYTES = WARPGROUP_M * ROW_BYTES
VECTORS = 4  # of 8 columns, whose values share a word


def _bits(pattern: int) -> Int32:
    return Int32(pattern - (pattern >> 31 << 32))


def _word(address):
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))


@dataclass(frozen=True)
class Residual:
    """The residuals of a block's epi tiles; `first` is their address in shared memory."""

    first: Int32
    truncated: bool

    @property
    def correction(self) -> float:
        """Compute 1 + half a step over the mantissa, 1 / (2 ln 2) on average if mantissas are as frequent as their
        inverses."""
        return 1 + 2.0 ** -(12 if self.truncated else 11) / (2 * math.log(2))

    def pack(self, registers, values):
        """Pack the upper 16 bits of the product's values, two to a word of `registers`."""
        words = cute.recast_tensor(registers, Int32)
        for i in range(cute.size(words)):
            words[i] = permute_bytes(*(values(2 * i + c).bitcast(Int32) for c in range(2)), 0x7632)

    def write(self, epi_tile, values, thread):
        """Write a consumer thread's residuals of an epi tile; `values` as in EpilogueStore.write."""
        row, word_offset = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 4
        swapped = thread % 32 // 16  # else rows would share banks
        for below in range(2):
            for w in range(2):
                starts = [4 * (VECTORS * w + j) + 2 * below for j in range(VECTORS)]
                bits = [[values(start + c).bitcast(Int32) for c in range(2)] for start in starts]
                row_address = self.first + epi_tile * RESIDUAL_BYTES + (row + 8 * below) * ROW_BYTES
                address = row_address + (w ^ swapped) * 16 + word_offset
                _word(address)[0] = self.word(bits)

    def word(self, bits):
        """Pack the residuals of eight products as fp32 bits, [vector][column of the pair]."""
        if self.truncated:  # byte j: vector j, its first column in the lower half
            pairs = [[permute_bytes(bits[j][c], bits[j + 1][c], 0x0051) for j in (0, 2)] for c in range(2)]
            first, second = (permute_bytes(*pair, 0x5410) for pair in pairs)
            return (second & _bits(0xF0F0F0F0)) | ((first >> 4) & _bits(0x0F0F0F0F))
        word = Int32(0)  # bits 4 j: vector j, its second column 16 bits higher
        for j in range(VECTORS):
            both = permute_bytes(*bits[j], 0x6521)
            word |= (both >> 5 - 4 * j if j < 2 else both << 4 * j - 5) & _bits(0x000F000F << 4 * j)
        return word

    def read(self, epi_tile, row, vector):
        """Read the words of a vector of 8 columns of a row; called by a thread of an epilogue warp."""
        address = self.first + epi_tile * RESIDUAL_BYTES + row * ROW_BYTES + (vector // VECTORS ^ row // 4 % 2) * 16
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
        words = cute.make_rmem_tensor(4, Int32)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Int32, num_bits_per_copy=128)
        cute.copy(copy, cute.make_tensor(pointer, cute.make_layout(4)), words)
        return words

    def value(self, rounded, words, v: int, vector):
        """Restore the v-th product of a vector from its 16 bits, in `rounded`, and its residual, in `words`."""
        pair = cute.recast_tensor(rounded, Int32)[v // 2]
        upper = pair << 16 if v % 2 == 0 else pair & _bits(0xFFFF0000)
        word, j = words[v // 2], vector % VECTORS
        if self.truncated:
            byte = permute_bytes(word, 0, 0x4404 + 16 * j)
            return (upper | ((byte << 4 if v % 2 == 0 else byte) & _bits(0xF000))).bitcast(Float32) * self.correction
        residual = word << (28 - 4 * j if v % 2 == 0 else 12 - 4 * j)
        # the difference to the 17 bits from bit 16 on, whose sign says which way it was rounded
        difference = (residual & _bits(0xF0000000)) ^ (upper << 15)
        return (upper + (difference >> 15)).bitcast(Float32) * self.correction
