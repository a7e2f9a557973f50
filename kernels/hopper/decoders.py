"""Decoders of packed weights: words of eight codes become bf16 values in registers, to the bit what expanding gives.

A thread decodes GROUP codes that share a scale. INT4 with scales in bf16 takes a product of bf16 for two values, which
rounds once. The other formats round to fp32 first, so that a code's value is not a product of bf16: the group's 16
values (of MXFP4 eight, and their signs) are computed once, in fp32, rounded, and kept as bytes in eight registers, from
which permutations look up the bytes of four codes at a time: six, and two that bring a value's bytes together.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..packed.nf4 import NF4_VALUES, SCALE_MAP, SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE
from .config import Stored
from .ptx import multiply_add, pack_bf16, permute_bytes, scale_codes, scale_pair

GROUP = 32  # values of a row that a thread decodes; they share a scale
SIGNS = 0x80808080 - (1 << 32)
TWICE_E2M1 = 0x3F800000, 0x40404000, 0x40C04080, 0x41404100  # bf16 pairs of 0, 1, 2, 3, 4, 6, 8, 12


@dataclass(frozen=True)
class Codes:
    """A packed weight: words [E, M, K / 8] of eight codes each, scales [E, M, K / group], and the format's state."""

    words: cute.Tensor
    scales: cute.Tensor
    state: cute.Tensor | None


class Decoder:
    """The base of decoders, each of one format. loaded: registers for what is loaded with a thread's codes. prepared:
    those for what it is made into, before the next codes are loaded."""

    loaded = prepared = 1

    def __init__(self, stored: Stored):
        self.group = stored.group

    def constants(self, codes: Codes):
        """Load what all groups have in common."""
        return ()

    def load(self, codes: Codes, expert, row, unit):
        """Load what stands beside the codes number GROUP * unit and following of a row."""
        return (codes.scales[expert, row, unit * GROUP // self.group].to(Float32).bitcast(Int32),)

    def prepare(self, codes: Codes, constants, loaded):
        """Make what was loaded into what `table` takes."""
        return loaded

    def table(self, prepared):
        """Compute the table by which `pairs` decodes all of a thread's words."""
        raise NotImplementedError

    def pairs(self, word, table):
        """Decode a word into four pairs of values, in their order."""
        raise NotImplementedError


class Int4(Decoder):
    """Codes less 8, times a scale in bf16: rounded once."""

    def prepare(self, codes, constants, loaded):
        (scale,) = loaded
        return (permute_bytes(scale, scale, 0x3232),)

    def table(self, prepared):
        return prepared[0]

    def pairs(self, word, table):
        shifted = word >> 4
        for byte in range(4):
            yield scale_codes(permute_bytes(word, shifted, 0x4400 + 0x1111 * byte), table)


def planes_of(pairs):
    """Return the low and the high bytes of values that come two to a word, four to a word each."""
    return [
        [permute_bytes(first, second, selector) for first, second in zip(pairs[::2], pairs[1::2])]
        for selector in (0x6420, 0x7531)
    ]


class LookedUp(Decoder):
    """Base of those that look values up by their codes. order: selectors of the bytes of a pair, of codes 0 and 1 and of
    codes 2 and 3, from a word of low bytes and one of high ones."""

    order = 0x5140, 0x7362

    def values(self, prepared):
        """Compute the group's 16 values, in fp32."""
        raise NotImplementedError

    def table(self, prepared):
        values = self.values(prepared)
        return planes_of([pack_bf16(values[i], values[i + 1]) for i in range(0, 16, 2)])

    def pairs(self, word, table):
        code = word & 0x77777777
        upper = (word >> 1) & 0x44444444 | 0x32103210  # a code of 8 or more takes the byte of the upper half
        for half in range(2):
            if half:  # a permutation reads four selectors
                code, upper = code >> 16, upper >> 16
            low, high = (self.look_up(plane, code, upper) for plane in table)
            for selector in self.order:
                yield permute_bytes(low, high, selector)

    def look_up(self, plane, code, upper):
        """Look the bytes of four codes up in those of all 16, or of eight."""
        found = [permute_bytes(plane[i], plane[i + 1], code) for i in range(0, len(plane), 2)]
        return found[0] if len(found) == 1 else permute_bytes(*found, upper)


class Integers(LookedUp):
    """INT4 with scales in fp16 or fp32, and UINT4, whose zeros are `state`."""

    def __init__(self, stored: Stored):
        super().__init__(stored)
        self.loaded = self.prepared = 2 if stored.format == "uint4" else 1

    def load(self, codes, expert, row, unit):
        loaded = super().load(codes, expert, row, unit)
        if codes.state is None:
            return loaded
        return *loaded, codes.state[expert, row, unit * GROUP // self.group].to(Int32)

    def values(self, prepared):
        scale, *zeros = prepared
        zero = zeros[0].to(Float32) if zeros else Float32(8.0)
        return [(Float32(code) - zero) * scale.bitcast(Float32) for code in range(16)]


class NF4(LookedUp):
    """The code book's values times a scale in fp32, which is a value of the scales' code book, times the scale of 256
    scales, plus an offset."""

    loaded = 2
    order = 0x4051, 0x6273  # the first value of a byte is that of its high half

    def constants(self, codes):
        return (codes.state[SCALE_OFFSET],)

    def load(self, codes, expert, row, unit):
        _, rows, groups = codes.scales.shape
        place = unit * GROUP // self.group
        number = ((expert * rows + row) * groups + place) // SCALES_PER_SCALE
        return codes.scales[expert, row, place].to(Int32), codes.state[SCALE_SCALES.start + number].bitcast(Int32)

    def prepare(self, codes, constants, loaded):
        scale, of_scales = loaded
        absmax = multiply_add(codes.state[SCALE_MAP.start + scale], of_scales.bitcast(Float32), *constants)
        return (absmax.bitcast(Int32),)

    def values(self, prepared):
        return [prepared[0].bitcast(Float32) * value for value in NF4_VALUES]


class MXFP4(LookedUp):
    """E2M1 values times a power of two: exact in bf16, as is twice the value times half the power."""

    def load(self, codes, expert, row, unit):
        return (codes.scales[expert, row, unit * GROUP // self.group].to(Int32),)

    def prepare(self, codes, constants, loaded):
        (scale,) = loaded
        # 2^(scale - 128): never infinite, subnormal for the two smallest
        half = cutlass.select_(scale > 1, (scale - 1) << 7, (scale + 1) << 5)
        return (half | half << 16,)

    def table(self, prepared):
        low, high = planes_of([scale_pair(Int32(pair), prepared[0]) for pair in TWICE_E2M1])
        return low, [*high, *(word | SIGNS for word in high)]


def decoder_of(stored: Stored) -> Decoder:
    """Return the decoder of packed weights with these facts."""
    if stored.format == "int4" and stored.scales == "bfloat16":
        return Int4(stored)
    return {"int4": Integers, "uint4": Integers, "nf4": NF4, "mxfp4": MXFP4}[stored.format](stored)
