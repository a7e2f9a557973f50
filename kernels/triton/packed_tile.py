"""Tiles of a packed weight in registers: bf16 values from words of codes, for the products that read packed weights.

Few instructions a value is everything here: at a few rows an expert a GPU has about six for each.

MXFP4: sign, exponent and mantissa move to where those of a tiny bf16 are, for two values at a time, and two products with
powers of two, which are exact, give the value.

NVFP4: as MXFP4, with an E4M3 scale in the place of the power of two, which is exact too; the scale of the tensor is a
factor of the sum.

INT4: a code beside the bits of 128 is 128 + code in bf16, from which 128 + zero is taken, which is exact, for two values
at a time. A product with the scale in bf16 gives the value. What a scale has beside its bf16 value is a factor of another
product, which is exact for scales in fp16, so that the sum of both is the value rounded once.

FP8: sign, exponent and mantissa of two values at a time move to where those of tiny bf16 are, and a product with 2^120
gives the values, which are exact; a block's scale is a factor of its sum. NaN, which loading refuses, becomes 480.

NF4: a table in shared memory has the two values of every byte, in every bank. Each lane reads its own bank, so two values
cost one load, and two instructions for its address; some words are looked up by byte permutations instead. The table is
the same for all blocks: a block's scale is a factor of its sum, in fp32. Values are rounded to bf16 beside a common
factor, NF4_FACTOR, which goes with the scale. With it they err by at most 0.2%, and half as much as each value rounded to
bf16 after scaling, in the mean square.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ..packed.nf4 import NF4_VALUES, SCALE_MAP, VALUE_MAP
from .dequantize import e4m3_value

# The factor between 1 and 2 with the smallest sum of squared errors of NF4_FACTOR * bf16(value / NF4_FACTOR).
NF4_FACTOR = 1.391785
_VALUE_MAP, _SCALE_MAP = tl.constexpr(VALUE_MAP.start), tl.constexpr(SCALE_MAP.start)
_FACTOR = tl.constexpr(NF4_FACTOR)


def _bf16_bits(value: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _lookups() -> list[str]:
    """Write PTX that leaves the bytes of four values in registers `low` and `high`, by `code` and `upper`."""
    bits = [_bf16_bits(value / NF4_FACTOR) for value in NF4_VALUES]
    lines = []
    for plane, shift in (("low", 0), ("high", 8)):
        words = [sum((bits[4 * word + i] >> shift & 0xFF) << 8 * i for i in range(4)) for word in range(4)]
        for half, word in (("first", 0), ("second", 2)):
            lines += [
                f"mov.b32 left, 0x{words[word]:08X};",
                f"mov.b32 right, 0x{words[word + 1]:08X};",
                f"prmt.b32 {half}, left, right, code;",
            ]
        lines.append(f"prmt.b32 {plane}, first, second, upper;")
    return lines


def _pair_of_byte() -> str:
    """Write PTX that leaves the two values of the byte in register `entry` in register `pair`, the first in its low
    half."""
    lines = [
        "and.b32 code, entry, 0x77;",  # a code's place in its half of the code book
        "shr.b32 upper, entry, 1;",
        "and.b32 upper, upper, 0x44;",
        "or.b32 upper, upper, 0x3210;",  # selects byte i of `second` where code i is 8 or more, else of `first`
    ]
    lines += _lookups()
    return "\n".join([*lines, "prmt.b32 pair, low, high, 0x4051;"])  # a byte's first value is that of its high half


def _nf4_table() -> str:
    """Write PTX for $0: the address in shared memory of the lane's words of the table; the scales' code book at $1
    goes behind it."""
    lines = [
        ".reg .b32 entry, code, upper, left, right, first, second, low, high, pair, lane, row, place, threads;",
        ".reg .b64 address;",
        ".reg .pred more;",
        ".shared .align 128 .b8 pairs[33792];",
        "mov.u32 entry, %tid.x;",
        "mov.u32 threads, %ntid.x;",
        "mov.u32 lane, %laneid;",
        "fill:",
        "mad.wide.u32 address, entry, 4, $1;",
        "ld.global.nc.b32 code, [address];",
        "mov.b32 row, pairs;",
        "mad.lo.u32 place, entry, 4, row;",
        "st.shared.b32 [place+32768], code;",
        _pair_of_byte(),
        "mad.lo.u32 row, entry, 128, row;",
    ]
    for turn in range(8):  # lanes in turn, since their rows begin in the same bank
        lines += [
            f"add.u32 place, lane, {turn};",
            "and.b32 place, place, 7;",
            "mad.lo.u32 place, place, 16, row;",
            "st.shared.v4.b32 [place], {pair, pair, pair, pair};",
        ]
    lines += [
        "add.u32 entry, entry, threads;",
        "setp.lt.u32 more, entry, 256;",
        "@more bra fill;",
        "bar.sync 0;",
        "mov.b32 row, pairs;",
        "mad.lo.u32 $0, lane, 4, row;",
    ]
    return "{" + "\n".join(lines) + "}"


def _nf4_of_word() -> str:
    """Write PTX for $0 .. $3: the values of word $4, by the table at $5."""
    lines = [".reg .b32 byte, place;"]
    for i in range(4):
        lines += [
            f"prmt.b32 byte, $4, 0, 0x444{i};",
            "mad.lo.u32 place, byte, 128, $5;",
            f"ld.shared.b32 ${i}, [place];",
        ]
    return "{" + "\n".join(lines) + "}"


def _nf4_by_permutations() -> str:
    """Write PTX for $0 .. $3: the values of word $4; $5 is not read."""
    lines = [
        ".reg .b32 code, upper, bytes, left, right, first, second, low, high;",
        "and.b32 code, $4, 0x77777777;",
        "mov.b32 bytes, 0x32103210;",
        "shr.b32 upper, $4, 1;",
        "lop3.b32 upper, upper, 0x44444444, bytes, 0xEA;",  # (upper & 0x44..) | bytes
    ]
    for half in range(2):
        if half:  # a permutation reads four selectors
            lines += ["shr.b32 code, code, 16;", "shr.b32 upper, upper, 16;"]
        lines += _lookups()
        for which, selector in enumerate(("0x4051", "0x6273")):  # a byte's first value is that of its high half
            lines.append(f"prmt.b32 ${2 * half + which}, low, high, {selector};")
    return "{" + "\n".join(lines) + "}"


def _mxfp4_of_word() -> str:
    """Write PTX for $0 .. $3: the values of the codes 0 and 4, 1 and 5, 2 and 6, 3 and 7 of word $4; $5: half of the
    scale, twice."""
    lines = [
        ".reg .b32 later, pair, most, none;",
        "mov.b32 most, 0x7F007F00;",  # 2^127
        "mov.b32 none, 0x80008000;",  # -0
        "shr.b32 later, $4, 8;",
    ]
    for digit in range(4):
        lines += [
            f"and.b32 pair, {'$4' if digit < 2 else 'later'}, 0x{0x000F000F << digit % 2 * 4:08X};",
            # once with the sign in its place, once with the rest
            f"mul.lo.u32 pair, pair, {(1 << 12 | 1 << 6) >> digit % 2 * 4};",
            "and.b32 pair, pair, 0x81C081C0;",
            "fma.rn.bf16x2 pair, pair, most, none;",
            f"fma.rn.bf16x2 ${digit}, pair, $5, none;",
        ]
    return "{" + "\n".join(lines) + "}"


def _int4_of_word(has_rest: bool) -> str:
    """Write PTX for $0 .. $3: the values of the codes 0 and 4, 1 and 5, 2 and 6, 3 and 7 of word $4; $5: -(128 + zero),
    twice; $6: the scale in bf16, twice; $7, where has_rest: what the scale has beside it."""
    lines = [
        ".reg .b32 pair, large, one, none, rest;",
        "mov.b32 large, 0x43004300;",  # 128
        "mov.b32 one, 0x3F803F80;",
        "mov.b32 none, 0x80008000;",  # -0
    ]
    for digit in range(4):
        lines += [
            f"shr.b32 pair, $4, {4 * digit};",
            "lop3.b32 pair, pair, 0x000F000F, large, 0xEA;",  # (pair & 0x000F..) | large
            "fma.rn.bf16x2 pair, pair, one, $5;",
        ]
        if has_rest:
            lines.append("fma.rn.bf16x2 rest, pair, $7, none;")
        lines.append(f"fma.rn.bf16x2 ${digit}, pair, $6, {'rest' if has_rest else 'none'};")
    return "{" + "\n".join(lines) + "}"


def _fp8_of_words() -> str:
    """Write PTX for $0 .. $3: the values of words $4 and $5, in their order."""
    lines = [
        ".reg .b32 pair, sign, most, none;",
        "mov.b32 most, 0x7B807B80;",  # 2^120
        "mov.b32 none, 0x80008000;",  # -0
    ]
    for i in range(4):
        lines += [
            f"prmt.b32 pair, ${4 + i // 2}, 0, 0x{0x3424 if i % 2 else 0x1404:04X};",  # a byte to the high half of each
            "and.b32 sign, pair, none;",
            "shr.b32 pair, pair, 4;",
            "lop3.b32 pair, pair, 0x07F007F0, sign, 0xEA;",  # (pair & 0x07F0..) | sign
            f"fma.rn.bf16x2 ${i}, pair, most, none;",
        ]
    return "{" + "\n".join(lines) + "}"


NF4_BY_PERMUTATIONS = tl.constexpr(_nf4_by_permutations())
NF4_TABLE, NF4_OF_WORD = tl.constexpr(_nf4_table()), tl.constexpr(_nf4_of_word())
MXFP4_OF_WORD, FP8_OF_WORDS = tl.constexpr(_mxfp4_of_word()), tl.constexpr(_fp8_of_words())
INT4_OF_WORD, INT4_OF_WORD_BESIDE = tl.constexpr(_int4_of_word(False)), tl.constexpr(_int4_of_word(True))
_FOUR_WORDS = tl.constexpr("=&r,=&r,=&r,=&r,r,r")


@triton.jit
def nf4_table(state, INTERPRETED: tl.constexpr):
    """Load the table of a program. Every thread must come here, once."""
    if INTERPRETED:
        return 0
    address = state.to(tl.int64)
    return tl.inline_asm_elementwise(NF4_TABLE, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def scale_of_code(code, table, state, INTERPRETED: tl.constexpr):
    """Look up the values of codes of NF4's scales, in the scales' own code book."""
    if INTERPRETED:
        return tl.load(state + _SCALE_MAP + code)
    address = (table & -128) + 32768 + code.to(tl.int32) * 4
    return tl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];", "=f,r", [address], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def look_up(pointer, index, INTERPRETED: tl.constexpr):
    """Gather fp32 values at indices, by the threads that have the indices; tl.load might choose others."""
    if INTERPRETED:
        return tl.load(pointer + index)
    address = (pointer + index).to(tl.int64)
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def half_scale(scale):
    """Compute half of MXFP4's scale, 2^(scale - 128), in bf16 bits, twice in a word: unlike the scale never infinite, and
    subnormal for the two smallest."""
    half = tl.where(scale > 1, (scale - 1) << 7, (scale + 1) << 5)
    return half | half << 16


@triton.jit
def half_e4m3_scale(code):
    """Compute half of the values of E4M3 codes, in bf16 bits, twice in a word: exact."""
    code = code.to(tl.uint32)
    bits = (code & 0x7F) << 20 | (code & 0x80) << 24
    half = bits.to(tl.float32, bitcast=True) * 6.64613997892458e35  # 2^119
    half = half.to(tl.uint32, bitcast=True) >> 16
    return (half | half << 16).to(tl.int32)


@triton.jit
def _unpack_bf16x2(words):
    """Unpack four tensors [A, B, 4] of bf16x2, two values to a word, into bf16 [A, B, 4, 8]."""
    joined = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    values = tl.join((joined & 0xFFFF).to(tl.uint16), (joined >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)
    return tl.reshape(values, (words[0].shape[0], words[0].shape[1], 4, 8))


@triton.jit
def nf4_values(word, table, state, PERMUTED: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Decode words [A, B, 4] into values [A, B, 4, 8] of the code book divided by NF4_FACTOR."""
    if INTERPRETED:
        shift = 4 * (tl.arange(0, 8) ^ 1)
        code = (word.to(tl.uint32)[:, :, :, None] >> shift[None, None, None, :].to(tl.uint32)) & 15
        return (tl.load(state + _VALUE_MAP + code) / _FACTOR).to(DTYPE)
    bf16x2 = tl.inline_asm_elementwise(
        NF4_BY_PERMUTATIONS if PERMUTED else NF4_OF_WORD,
        _FOUR_WORDS,
        [word, table],
        dtype=(tl.uint32,) * 4,
        is_pure=True,
        pack=1,
    )
    return _unpack_bf16x2(bf16x2)


@triton.jit
def mxfp4_values(word, scale, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Decode words [A, B, 4] with a `half_scale` for each into values [A, B, 4, 8], in the order 0, 4, 1, 5, 2, 6, 3,
    7."""
    if INTERPRETED:
        digit = tl.arange(0, 8)
        shift = 4 * (digit // 2 + digit % 2 * 4)
        code = (word.to(tl.uint32)[:, :, :, None] >> shift[None, None, None, :].to(tl.uint32)) & 15
        bits = (code & 7) << 22 | (code & 8) << 28
        half = (scale.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        return (bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38 * half[:, :, :, None]).to(DTYPE)
    bf16x2 = tl.inline_asm_elementwise(
        MXFP4_OF_WORD, _FOUR_WORDS, [word, scale], dtype=(tl.uint32,) * 4, is_pure=True, pack=1
    )
    return _unpack_bf16x2(bf16x2)


@triton.jit
def _twice(half):
    """Repeat the bits of bf16 values in both halves of a word."""
    bits = half.to(tl.uint16, bitcast=True).to(tl.uint32)
    return bits | bits << 16


@triton.jit
def int4_values(word, zero, scale, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Decode words [A, B, 4] with a zero and a scale for each into values [A, B, 4, 8], in the order 0, 4, 1, 5, 2, 6, 3,
    7."""
    if INTERPRETED:
        digit = tl.arange(0, 8)
        shift = 4 * (digit // 2 + digit % 2 * 4)
        code = (word.to(tl.uint32)[:, :, :, None] >> shift[None, None, None, :].to(tl.uint32)) & 15
        return ((code.to(tl.int32) - zero[:, :, :, None]).to(tl.float32) * scale.to(tl.float32)[:, :, :, None]).to(
            DTYPE
        )
    less = (zero.to(tl.uint32) + 0xC300) * 0x10001  # -(128 + zero)
    high = scale.to(tl.bfloat16)
    if scale.dtype == tl.bfloat16:
        bf16x2 = tl.inline_asm_elementwise(
            INT4_OF_WORD, "=&r,=&r,=&r,=&r,r,r,r", [word, less, _twice(high)], (tl.uint32,) * 4, is_pure=True, pack=1
        )
    else:
        rest = (scale.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
        bf16x2 = tl.inline_asm_elementwise(
            INT4_OF_WORD_BESIDE,
            "=&r,=&r,=&r,=&r,r,r,r,r",
            [word, less, _twice(high), _twice(rest)],
            (tl.uint32,) * 4,
            is_pure=True,
            pack=1,
        )
    return _unpack_bf16x2(bf16x2)


@triton.jit
def fp8_values(low, high, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Decode words [A, B, 4], `low` and those after them, `high`, into values [A, B, 4, 8]."""
    if INTERPRETED:
        words = tl.join(low, high).to(tl.uint32)
        code = (words[:, :, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, None, :].to(tl.uint32)) & 255
        return tl.reshape(e4m3_value(code), (low.shape[0], low.shape[1], 4, 8)).to(DTYPE)
    bf16x2 = tl.inline_asm_elementwise(
        FP8_OF_WORDS, _FOUR_WORDS, [low, high], dtype=(tl.uint32,) * 4, is_pure=True, pack=1
    )
    return _unpack_bf16x2(bf16x2)
