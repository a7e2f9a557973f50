"""Decoders of packed weights: words of eight 4-bit codes become bf16 values in registers, to the bit what expanding
gives.

A thread decodes a segment of a row, 32 codes in four words, which share a scale. There are two ways:

    arithmetic   INT4 with scales in bf16: (code - 8) * scale, two values an instruction, each rounded once to bf16.
    lookup       All others. Expanding rounds their values to fp32 and then to bf16, which no product of bf16 gives. So a
                 thread computes the values of all 16 codes once, in that way, and keeps the low and the high bytes of
                 them apart, four to a register. A byte permutation (prmt) then takes four codes as its selectors:

                     codes 3 9 0 14  ->  low bytes  l3 l9 l0 l14                    three permutations: a code's lower
                                         high bytes h3 h9 h0 h14                    three bits choose in each half of the
                                     ->  values     l3 h3, l9 h9, l0 h0, l14 h14    codebook, the fourth the half

                 That is six permutations for four codes, and two that bring the bytes of a value together.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..packed.nf4 import NF4_VALUES, SCALE_MAP, SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE
from .config import PackedKind
from .ptx import dequantize_int4x2, multiply_add, multiply_bf16x2, pack_bf16x2, permute_bytes

SEGMENT = 32  # codes of a row that a thread decodes; they share a scale
SEGMENT_WORDS = SEGMENT // 8
SIGNS = 0x80808080 - (1 << 32)  # sign bits of the high bytes of four bf16 values
TWICE_E2M1 = 0x3F800000, 0x40404000, 0x40C04080, 0x41404100  # bf16x2 of 0, 1, 2, 3, 4, 6, 8, 12, the first the lower


@dataclass(frozen=True)
class PackedTensors:
    """A packed weight: words [E, M, K / 8] of eight codes each, scales [E, M, K / group], and the format's state."""

    words: cute.Tensor
    scales: cute.Tensor
    state: cute.Tensor | None


class Decoder:
    """Base of the decoders, each of one format. Methods are called in the order in which they stand here.

    raw_registers, scale_registers: how many words of 32 bits a segment's raw scale and its scale take. Raw is what memory
    has; a zero point counts with its scale.
    """

    raw_registers = scale_registers = 1

    def __init__(self, kind: PackedKind):
        self.group = kind.group

    def load_constants(self, packed: PackedTensors):
        """Load the numbers that the scales of all segments have in common."""
        return ()

    def load_raw_scale(self, packed: PackedTensors, expert, row, segment):
        """Load the raw scale of the row's codes from SEGMENT * segment on."""
        return (packed.scales[expert, row, segment * SEGMENT // self.group].to(Float32).bitcast(Int32),)

    def make_scale(self, packed: PackedTensors, constants, raw_scale):
        """Make the scale that `codebook` takes from a raw one."""
        return raw_scale

    def codebook(self, scale):
        """Compute the values of a segment's 16 codes, for `decode`; or pass on the scale alone, if that is all it
        needs."""
        raise NotImplementedError

    def decode(self, word, codebook):
        """Decode a word of eight codes into four words of two bf16 values (bf16x2), in their order."""
        raise NotImplementedError


class Int4Arithmetic(Decoder):
    """INT4 with scales in bf16: (code - 8) * scale, rounded once."""

    def make_scale(self, packed, constants, raw_scale):
        (scale,) = raw_scale
        return (permute_bytes(scale, scale, 0x3232),)  # the upper half of the fp32 scale, which is the bf16 one, twice

    def codebook(self, scale):
        return scale[0]

    def decode(self, word, codebook):
        shifted = word >> 4
        for byte in range(4):
            # both halves get a copy of the byte: its lower code in the word's low bits, its upper code in the shifted's
            yield dequantize_int4x2(permute_bytes(word, shifted, 0x4400 + 0x1111 * byte), codebook)


def byte_planes(bf16x2):
    """Split bf16 values, two to a word, into their low and their high bytes, four to a word each."""
    return [
        [permute_bytes(first, second, selector) for first, second in zip(bf16x2[::2], bf16x2[1::2])]
        for selector in (0x6420, 0x7531)
    ]


class LookupDecoder(Decoder):
    """Base of the decoders by lookup. A codebook is the byte planes of the values of 16 codes, or of the lower eight
    where both halves have the same plane.

    order: prmt's selectors which make bf16x2 of a word of four low bytes and one of four high ones, for the codes 0 and 1
    of the four, and for 2 and 3.
    """

    order = 0x5140, 0x7362

    def values(self, scale):
        """Compute the values of the 16 codes, in fp32."""
        raise NotImplementedError

    def codebook(self, scale):
        values = self.values(scale)
        return byte_planes([pack_bf16x2(values[i], values[i + 1]) for i in range(0, 16, 2)])

    def decode(self, word, codebook):
        code = word & 0x77777777
        upper = (word >> 1) & 0x44444444 | 0x32103210  # a code of 8 or more takes the byte of the upper half
        for half in range(2):
            if half:  # a permutation reads four selectors
                code, upper = code >> 16, upper >> 16
            low, high = (self.look_up(plane, code, upper) for plane in codebook)
            for selector in self.order:
                yield permute_bytes(low, high, selector)

    def look_up(self, plane, code, upper):
        """Look the bytes of four codes up in a plane of 16 bytes, or of eight."""
        by_half = [permute_bytes(plane[i], plane[i + 1], code) for i in range(0, len(plane), 2)]
        return by_half[0] if len(by_half) == 1 else permute_bytes(*by_half, upper)


class IntegerLookup(LookupDecoder):
    """INT4 with scales in fp16 or fp32, and UINT4, whose zero points are `state`."""

    def __init__(self, kind: PackedKind):
        super().__init__(kind)
        self.raw_registers = self.scale_registers = 2 if kind.format == "uint4" else 1

    def load_raw_scale(self, packed, expert, row, segment):
        raw_scale = super().load_raw_scale(packed, expert, row, segment)
        if packed.state is None:
            return raw_scale
        return *raw_scale, packed.state[expert, row, segment * SEGMENT // self.group].to(Int32)

    def values(self, scale):
        factor, *zeros = scale
        zero = zeros[0].to(Float32) if zeros else Float32(8.0)
        return [(Float32(code) - zero) * factor.bitcast(Float32) for code in range(16)]


class NF4Lookup(LookupDecoder):
    """NF4's 16 values times a scale, which is quantized itself: an entry of the scales' own codebook (SCALE_MAP), times
    the scale of 256 scales, plus an offset."""

    raw_registers = 2
    order = 0x4051, 0x6273  # the first value of a byte is that of its high half

    def load_constants(self, packed):
        return (packed.state[SCALE_OFFSET],)

    def load_raw_scale(self, packed, expert, row, segment):
        _, rows, groups = packed.scales.shape
        group = segment * SEGMENT // self.group
        scale_of_scales = ((expert * rows + row) * groups + group) // SCALES_PER_SCALE
        return (
            packed.scales[expert, row, group].to(Int32),
            packed.state[SCALE_SCALES.start + scale_of_scales].bitcast(Int32),
        )

    def make_scale(self, packed, constants, raw_scale):
        scale_code, scale_of_scales = raw_scale
        absmax = multiply_add(packed.state[SCALE_MAP.start + scale_code], scale_of_scales.bitcast(Float32), *constants)
        return (absmax.bitcast(Int32),)

    def values(self, scale):
        return [scale[0].bitcast(Float32) * value for value in NF4_VALUES]


class MXFP4Lookup(LookupDecoder):
    """E2M1 values times a power of two: exact in bf16, and computed as twice the value times half the power, which unlike
    the power itself is never infinite. The upper eight codes are the lower eight with a minus sign."""

    def load_raw_scale(self, packed, expert, row, segment):
        return (packed.scales[expert, row, segment * SEGMENT // self.group].to(Int32),)

    def make_scale(self, packed, constants, raw_scale):
        (exponent,) = raw_scale
        # 2^(exponent - 128) in bf16, subnormal for the two smallest
        half_power = cutlass.select_(exponent > 1, (exponent - 1) << 7, (exponent + 1) << 5)
        return (half_power | half_power << 16,)

    def codebook(self, scale):
        low, high = byte_planes([multiply_bf16x2(Int32(twice), scale[0]) for twice in TWICE_E2M1])
        return low, [*high, *(word | SIGNS for word in high)]


def decoder_of(kind: PackedKind) -> Decoder:
    """Make the decoder of packed weights of a kind."""
    if kind.format == "int4" and kind.scales == "bfloat16":
        return Int4Arithmetic(kind)
    return {"int4": IntegerLookup, "uint4": IntegerLookup, "nf4": NF4Lookup, "mxfp4": MXFP4Lookup}[kind.format](kind)
