"""4-bit weights to floats, at the memory's bandwidth; the formats are in ../quantized.py.

Only experts that have rows are read and written. A thread takes a 32-bit word of eight codes, whose values are 16 bytes
of bf16: loads and stores are contiguous over a warp, and no value changes threads. Words and scales of all steps are
loaded first, because loads are not moved ahead of stores. A multiplication and the addition after it round separately,
as in the packages whose values these must be: fusion of the two is switched off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quantized import FORMATS, SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE, VALUE_MAP, Quantized, weight_shape
from .launch import cdiv, launch_kernel

CODES = 8  # of a word
WARPS = 4
WORDS, STEPS = 32 * WARPS, 4  # words of a step, one for every thread; steps of a program


@triton.jit
def dequantize_nf4_kernel(
    words, scales, state, out, offsets,
    WORDS_PER_EXPERT: tl.constexpr, WORDS_PER_SCALE: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
    VALUE_MAP: tl.constexpr, SCALE_OFFSET: tl.constexpr, SCALE_SCALES: tl.constexpr, SCALES_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """STEPS * WORDS words of one expert, the first value of a byte in its high half."""
    programs: tl.constexpr = (WORDS_PER_EXPERT + WORDS * STEPS - 1) // (WORDS * STEPS)
    expert = tl.program_id(0) // programs
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        return
    first = tl.program_id(0) % programs * (WORDS * STEPS)
    words += expert.to(tl.int64) * WORDS_PER_EXPERT
    out += expert.to(tl.int64) * (8 * WORDS_PER_EXPERT)
    offset = tl.load(state + SCALE_OFFSET)
    word = ()
    absmax = ()
    for step in tl.static_range(STEPS):
        place = first + step * WORDS + tl.arange(0, WORDS)
        is_word = place < WORDS_PER_EXPERT
        block = expert * (WORDS_PER_EXPERT // WORDS_PER_SCALE) + place // WORDS_PER_SCALE
        word += (tl.load(words + place, mask=is_word, other=0),)
        scale = tl.load(state + tl.load(scales + block, mask=is_word, other=0).to(tl.uint32))
        scale *= tl.load(state + SCALE_SCALES + block // SCALES_PER_SCALE, mask=is_word, other=0.0)
        absmax += (scale + offset,)
    digit = tl.arange(0, 8)
    for step in tl.static_range(STEPS):
        place = first + step * WORDS + tl.arange(0, WORDS)
        is_word = place < WORDS_PER_EXPERT
        code = (word[step].to(tl.uint32)[:, None] >> (4 * (digit ^ 1))[None, :].to(tl.uint32)) & 15
        value = tl.load(state + VALUE_MAP + code) * absmax[step][:, None]
        tl.store(out + place[:, None] * 8 + digit[None, :], value.to(out.dtype.element_ty), mask=is_word[:, None])


@triton.jit
def _twice_e2m1(code):
    """Twice the value of an E2M1 code: its exponent and mantissa stand where those of a tiny fp32 do."""
    bits = (code & 7) << 22 | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2^127


@triton.jit
def dequantize_mxfp4_kernel(
    words, scales, out, offsets,
    WORDS_PER_EXPERT: tl.constexpr, WORDS_PER_SCALE: tl.constexpr, WORDS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """STEPS * WORDS words of one expert, the first value of a byte in its low half."""
    programs: tl.constexpr = (WORDS_PER_EXPERT + WORDS * STEPS - 1) // (WORDS * STEPS)
    expert = tl.program_id(0) // programs
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        return
    first = tl.program_id(0) % programs * (WORDS * STEPS)
    words += expert.to(tl.int64) * WORDS_PER_EXPERT
    out += expert.to(tl.int64) * (8 * WORDS_PER_EXPERT)
    word = ()
    half = ()
    for step in tl.static_range(STEPS):
        place = first + step * WORDS + tl.arange(0, WORDS)
        is_word = place < WORDS_PER_EXPERT
        block = expert * (WORDS_PER_EXPERT // WORDS_PER_SCALE) + place // WORDS_PER_SCALE
        word += (tl.load(words + place, mask=is_word, other=0),)
        scale = tl.load(scales + block, mask=is_word, other=0).to(tl.uint32)
        # half of 2^(scale - 127): never infinite, subnormal for the two smallest scales
        half += (tl.where(scale > 1, (scale - 1) << 23, (scale + 1) << 21).to(tl.float32, bitcast=True),)
    digit = tl.arange(0, 8)
    for step in tl.static_range(STEPS):
        place = first + step * WORDS + tl.arange(0, WORDS)
        is_word = place < WORDS_PER_EXPERT
        code = word[step].to(tl.uint32)[:, None] >> (4 * digit)[None, :].to(tl.uint32)
        value = _twice_e2m1(code) * half[step][:, None]
        if out.dtype.element_ty == tl.bfloat16:  # exact; a conversion may flush subnormals
            value = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(out + place[:, None] * 8 + digit[None, :], value.to(out.dtype.element_ty), mask=is_word[:, None])


def words_of(codes):
    """Codes as int32, copied where they do not start at a multiple of 16 bytes."""
    return (codes.clone() if codes.data_ptr() % 16 else codes).view(torch.int32)


def dequantize(codes, scales, state, name, dtype, rows):
    num_experts, size_out, size_in = weight_shape(Quantized(codes, scales, state), name)
    weight_ENK = codes.new_empty(num_experts, size_out, size_in, dtype=dtype)
    words_per_expert = size_out * size_in // CODES
    grid = (num_experts * cdiv(words_per_expert, WORDS * STEPS),)
    constants = (words_per_expert, FORMATS[name] // CODES, WORDS, STEPS)
    if name == "mxfp4":
        tensors = words_of(codes), scales, weight_ENK, rows.offsets
        launch_kernel(dequantize_mxfp4_kernel, grid, tensors, (), constants, num_warps=WARPS)
    else:
        constants += (VALUE_MAP.start, SCALE_OFFSET, SCALE_SCALES.start, SCALES_PER_SCALE)
        tensors = words_of(codes), scales, state, weight_ENK, rows.offsets
        launch_kernel(dequantize_nf4_kernel, grid, tensors, (), constants, num_warps=WARPS, enable_fp_fusion=False)
    return weight_ENK
