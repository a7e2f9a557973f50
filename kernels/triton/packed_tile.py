"""Tiles of a 4-bit weight in registers: bf16 values from words of eight codes, for the products that read packed weights.

Few instructions a value is everything here: at a few rows an expert a GPU has about six for each. Two values are made
at a time, in PTX. MXFP4: exponent and mantissa move to where those of a tiny bf16 are, and two products with powers of
two, which are exact, give the value. NF4: sixteen products with the block's scale, rounded to bf16, are a table in eight
registers, high and low bytes apart, and byte permutations look eight codes up in it.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ..quantized import NF4_VALUES, VALUE_MAP

_VALUE_MAP = tl.constexpr(VALUE_MAP.start)


def _shifted(register: str, distance: int) -> str:
    return f"shl.b32 {register}, $8, {distance};" if distance >= 0 else f"shr.b32 {register}, $8, {-distance};"


def _mxfp4_of_word() -> str:
    """$0 .. $7: bf16 values of the codes 0, 4, 1, 5, 2, 6, 3, 7 of word $8; $9: half of the scale, twice."""
    lines = [
        ".reg .b32 sign, rest, most, none;",
        "mov.b32 most, 0x7F007F00;",
        "mov.b32 none, 0x80008000;",
    ]  # 2^127, -0
    for digit in range(4):
        lines += [
            _shifted("sign", 12 - 4 * digit),
            "and.b32 sign, sign, 0x80008000;",
            _shifted("rest", 6 - 4 * digit),
            "and.b32 rest, rest, 0x01C001C0;",
            "or.b32 rest, rest, sign;",
            "fma.rn.bf16x2 rest, rest, most, none;",
            "fma.rn.bf16x2 rest, rest, $9, none;",
            f"mov.b32 {{${2 * digit}, ${2 * digit + 1}}}, rest;",
        ]
    return "{" + "\n".join(lines) + "}"


def _nf4_table() -> str:
    """$0 .. $3: low bytes of the sixteen values of a block, $4 .. $7: high bytes; $8: the scale, fp32."""
    lines = [".reg .f32 value<16>;", ".reg .b32 pair<8>;"]
    for code, value in enumerate(NF4_VALUES):
        lines.append(f"mul.rn.f32 value{code}, $8, 0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X};")
    for pair in range(8):
        lines.append(f"cvt.rn.bf16x2.f32 pair{pair}, value{2 * pair + 1}, value{2 * pair};")
    for part in range(4):
        lines.append(f"prmt.b32 ${part}, pair{2 * part}, pair{2 * part + 1}, 0x6420;")
        lines.append(f"prmt.b32 ${part + 4}, pair{2 * part}, pair{2 * part + 1}, 0x7531;")
    return "{" + "\n".join(lines) + "}"


def _nf4_of_word() -> str:
    """$0 .. $7: bf16 values of word $8 in their order, by the table $9 .. $16."""
    lines = [
        ".reg .b32 code, upper, bytes, first, second, low, high, pair;",
        "and.b32 code, $8, 0x77777777;",  # a code's place in its half of the table
        "mov.b32 bytes, 0x32103210;",
        "shr.b32 upper, $8, 1;",
        # (upper & 0x44..) | bytes: selects byte i of `second` where code i is 8 or more, else of `first`
        "lop3.b32 upper, upper, 0x44444444, bytes, 0xEA;",
    ]
    for half in range(2):
        if half:  # a permutation reads four selectors
            lines += ["shr.b32 code, code, 16;", "shr.b32 upper, upper, 16;"]
        for plane, table in (("low", 9), ("high", 13)):
            lines += [
                f"prmt.b32 first, ${table}, ${table + 1}, code;",
                f"prmt.b32 second, ${table + 2}, ${table + 3}, code;",
                f"prmt.b32 {plane}, first, second, upper;",
            ]
        for which, selector in enumerate(("0x4051", "0x6273")):  # a byte's first value is that of its high half
            at = 4 * half + 2 * which
            lines += [f"prmt.b32 pair, low, high, {selector};", f"mov.b32 {{${at}, ${at + 1}}}, pair;"]
    return "{" + "\n".join(lines) + "}"


MXFP4_OF_WORD = tl.constexpr(_mxfp4_of_word())
NF4_TABLE = tl.constexpr(_nf4_table())
NF4_OF_WORD = tl.constexpr(_nf4_of_word())
_EIGHT_VALUES = "=h,=h,=h,=h,=h,=h,=h,=h,"
VALUES_AND_SCALE = tl.constexpr(_EIGHT_VALUES + "r,r")
VALUES_AND_TABLE = tl.constexpr(_EIGHT_VALUES + "r,r,r,r,r,r,r,r,r")
TABLE_AND_SCALE = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,f")


@triton.jit
def _interpreted(word, scale, state, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """`unpacked` without PTX: [N, W, 8]."""
    digit = tl.arange(0, 8)
    place = digit ^ 1 if FORMAT == "nf4" else digit // 2 + digit % 2 * 4
    code = (word.to(tl.uint32)[:, :, None] >> (4 * place)[None, None, :].to(tl.uint32)) & 15
    if FORMAT == "nf4":
        return (tl.load(state + _VALUE_MAP + code) * scale[:, :, None]).to(DTYPE)
    bits = (code & 7) << 22 | (code & 8) << 28
    half = (scale.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38 * half[:, :, None]).to(DTYPE)


@triton.jit
def half_scale(scale):
    """bf16 bits, twice, of 2^(scale - 128): never infinite, subnormal for the two smallest scales of MXFP4."""
    half = tl.where(scale > 1, (scale - 1) << 7, (scale + 1) << 5)
    return half | half << 16


@triton.jit
def unpacked(
    word, scale, state, FORMAT: tl.constexpr, HEIGHT: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The values [HEIGHT, 8 * WORDS] of words [HEIGHT, WORDS] with a scale for each: fp32, or for MXFP4 `half_scale`.

    NF4's in their order, MXFP4's eight of a word as 0, 4, 1, 5, 2, 6, 3, 7 (`in_order_of_words`).
    """
    if INTERPRETED:
        return tl.reshape(_interpreted(word, scale, state, FORMAT, DTYPE), (HEIGHT, 8 * WORDS))
    if FORMAT == "nf4":
        table = tl.inline_asm_elementwise(
            NF4_TABLE, TABLE_AND_SCALE, [scale], dtype=(tl.int32,) * 8, is_pure=True, pack=1
        )
        v = tl.inline_asm_elementwise(
            NF4_OF_WORD, VALUES_AND_TABLE,
            [word, table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7]],
            dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        v = tl.inline_asm_elementwise(
            MXFP4_OF_WORD, VALUES_AND_SCALE, [word, scale], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    return tl.reshape(tl.join(even, odd), (HEIGHT, 8 * WORDS))


@triton.jit
def in_order_of_words(x, FORMAT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """x [ROWS, 8 * WORDS] in the order of `unpacked`."""
    if FORMAT == "nf4":
        return x
    x = tl.permute(tl.reshape(x, (ROWS, WORDS, 2, 4)), (0, 1, 3, 2))
    return tl.reshape(x, (ROWS, 8 * WORDS))
