"""Tiles of a 4-bit weight in registers: bf16 values from bytes of two codes, for the products that read packed weights.

Few instructions a value is everything here: at a few rows an expert a GPU has about six for each. A table in shared memory
has the two values of every byte, in every bank: each lane reads its own bank, so two values cost one load, and two
instructions for its address. The scale of a block is a factor of its sum, not of its values.

MXFP4's values are exact in bf16. NF4's are rounded beside a common factor, NF4_FACTOR, with which they err by at most
0.2% and half as much as bf16 does on the average; the scale has the factor too, in fp32.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ..quantized import E2M1_VALUES, NF4_VALUES, VALUE_MAP

NF4_FACTOR = 1.391785  # of 1 to 2, that with the smallest sum of squared errors of NF4_FACTOR * bf16(value / NF4_FACTOR)
# Twice MXFP4's values: then half a scale goes with them, which fp32 has for each of its codes.
_TABLES = {
    "nf4": [value / NF4_FACTOR for value in NF4_VALUES],
    "mxfp4": [2 * sign * value for sign in (1, -1) for value in E2M1_VALUES],
}
_FIRST_VALUE_LAST = {"nf4": "0x4051", "mxfp4": "0x5140"}  # which half of a byte has the first value
_VALUE_MAP, _FACTOR = tl.constexpr(VALUE_MAP.start), tl.constexpr(NF4_FACTOR)


def _bf16_bits(value: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def pair_of_byte(name: str) -> str:
    """PTX that leaves the two values of the byte in register `entry` in register `pair`, the first in its low half."""
    bits = [_bf16_bits(value) for value in _TABLES[name]]
    lines = [
        "and.b32 code, entry, 0x77;",  # a code's place in its half of the table
        "shr.b32 upper, entry, 1;",
        "and.b32 upper, upper, 0x44;",
        "or.b32 upper, upper, 0x3210;",  # selects byte i of `second` where code i is 8 or more, else of `first`
    ]
    for plane, shift in (("low", 0), ("high", 8)):
        parts = [
            sum((bits[4 * part + i] >> shift & 0xFF) << 8 * i for i in range(4)) for part in range(4)
        ]
        for name_of_half, part in (("first", 0), ("second", 2)):
            lines += [
                f"mov.b32 left, 0x{parts[part]:08X};",
                f"mov.b32 right, 0x{parts[part + 1]:08X};",
                f"prmt.b32 {name_of_half}, left, right, code;",
            ]
        lines.append(f"prmt.b32 {plane}, first, second, upper;")
    lines.append(f"prmt.b32 pair, low, high, {_FIRST_VALUE_LAST[name]};")
    return "\n".join(lines)


def _table(name: str) -> str:
    """$0: the address in shared memory of the lane's words of the table; $1 is not read."""
    lines = [
        ".reg .b32 entry, code, upper, left, right, first, second, low, high, pair, lane, row, place, threads;",
        ".reg .pred more;",
        ".shared .align 128 .b8 pairs[32768];",
        "mov.u32 entry, %tid.x;",
        "mov.u32 threads, %ntid.x;",
        "mov.u32 lane, %laneid;",
        "fill:",
        pair_of_byte(name),
        "mov.b32 row, pairs;",
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


def _values_of_word() -> str:
    """$0 .. $7: the values of word $8, by the table at $9."""
    lines = [".reg .b32 byte, place;"]
    for i in range(4):
        lines += [
            f"prmt.b32 byte, $4, 0, 0x444{i};",
            "mad.lo.u32 place, byte, 128, $5;",
            f"ld.shared.b32 ${i}, [place];",
        ]
    return "{" + "\n".join(lines) + "}"


NF4_TABLE, MXFP4_TABLE = tl.constexpr(_table("nf4")), tl.constexpr(_table("mxfp4"))
VALUES_OF_WORD = tl.constexpr(_values_of_word())
_VALUES_AND_WORD = tl.constexpr("=&r,=&r,=&r,=&r,r,r")


@triton.jit
def table_of_pairs(FORMAT: tl.constexpr, INTERPRETED: tl.constexpr):
    """The table of a program, for `unpacked`. Every thread must come here, once."""
    if INTERPRETED:
        return 0
    return tl.inline_asm_elementwise(
        NF4_TABLE if FORMAT == "nf4" else MXFP4_TABLE, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def half_scale(scale):
    """2^(scale - 128), which fp32 has for all scales of MXFP4."""
    return tl.where(scale > 1, (scale - 1) << 23, (scale + 1) << 21).to(tl.float32, bitcast=True)


@triton.jit
def gathered(pointer, index, INTERPRETED: tl.constexpr):
    """fp32 values at indices, by the threads that have the indices; tl.load might choose others."""
    if INTERPRETED:
        return tl.load(pointer + index)
    address = (pointer + index).to(tl.int64)
    return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def in_order_of_words(values):
    """values [A, B, 4, 8] of four words as [A, B, 2, 4, 4]: the first halves of all, then the second ones, since a lane
    gives tensor cores four values at a time."""
    A: tl.constexpr = values.shape[0]
    B: tl.constexpr = values.shape[1]
    return tl.permute(tl.reshape(values, (A, B, 4, 2, 4)), (0, 1, 3, 2, 4))


@triton.jit
def unpacked(word, table, state, FORMAT: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The values [A, B, 32] of words [A, B, 4], in the order of `in_order_of_words`, before they are scaled."""
    A: tl.constexpr = word.shape[0]
    B: tl.constexpr = word.shape[1]
    if INTERPRETED:
        digit = tl.arange(0, 8)
        place = digit ^ 1 if FORMAT == "nf4" else digit
        code = (word.to(tl.uint32)[:, :, :, None] >> (4 * place)[None, None, None, :].to(tl.uint32)) & 15
        if FORMAT == "nf4":
            values = (tl.load(state + _VALUE_MAP + code) / _FACTOR).to(DTYPE)
        else:
            bits = (code & 7) << 22 | (code & 8) << 28
            values = (bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38).to(DTYPE)
        return tl.reshape(in_order_of_words(values), (A, B, 32))
    pairs = tl.inline_asm_elementwise(
        VALUES_OF_WORD, _VALUES_AND_WORD, [word, table], dtype=(tl.uint32,) * 4, is_pure=True, pack=1
    )
    pairs = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
    values = tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)
    return tl.reshape(in_order_of_words(tl.reshape(values, (A, B, 4, 8))), (A, B, 32))
