"""Packed weights to floats, at the memory's bandwidth; the formats are in ../packed.

Only experts that have rows are read and written. A thread takes eight codes, one or two 32-bit words, whose values are
16 bytes of bf16: loads and stores are contiguous over a warp, and no value changes threads. Words and scales of all
steps are loaded first, because loads are not moved ahead of stores. A multiplication and the addition after it round
separately, as in the packages whose values these must be: fusion of the two is switched off.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..packed import FORMATS, Quantized
from ..packed.fp8 import FP8_BLOCK
from ..packed.nf4 import SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE, VALUE_MAP
from .launch import cdiv, launch_kernel

CODES = 8  # of 4 bits in a word of 32
WARPS = 4
WORDS, STEPS = 32 * WARPS, 4  # words of a step, one for every thread; steps of a program


@triton.jit
def dequantize_nf4_kernel(
    words,
    scales,
    state,
    out,
    offsets,
    WORDS_PER_EXPERT: tl.constexpr,
    WORDS_PER_SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    VALUE_MAP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    SCALE_SCALES: tl.constexpr,
    SCALES_PER_SCALE: tl.constexpr,
):
    """Dequantize STEPS * WORDS words of one expert, the first value of a byte in its high half."""
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
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        block = expert * (WORDS_PER_EXPERT // WORDS_PER_SCALE) + index // WORDS_PER_SCALE
        word += (tl.load(words + index, mask=is_word, other=0),)
        scale = tl.load(state + tl.load(scales + block, mask=is_word, other=0).to(tl.uint32))
        scale *= tl.load(state + SCALE_SCALES + block // SCALES_PER_SCALE, mask=is_word, other=0.0)
        absmax += (scale + offset,)
    digit = tl.arange(0, 8)
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        code = (word[step].to(tl.uint32)[:, None] >> (4 * (digit ^ 1))[None, :].to(tl.uint32)) & 15
        value = tl.load(state + VALUE_MAP + code) * absmax[step][:, None]
        tl.store(out + index[:, None] * 8 + digit[None, :], value.to(out.dtype.element_ty), mask=is_word[:, None])


@triton.jit
def _twice_e2m1(code):
    """Compute twice the value of an E2M1 code: its exponent and mantissa are moved to those of a tiny fp32."""
    bits = (code & 7) << 22 | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2^127


@triton.jit
def dequantize_mxfp4_kernel(
    words,
    scales,
    out,
    offsets,
    WORDS_PER_EXPERT: tl.constexpr,
    WORDS_PER_SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Dequantize STEPS * WORDS words of one expert, the first value of a byte in its low half."""
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
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        block = expert * (WORDS_PER_EXPERT // WORDS_PER_SCALE) + index // WORDS_PER_SCALE
        word += (tl.load(words + index, mask=is_word, other=0),)
        scale = tl.load(scales + block, mask=is_word, other=0).to(tl.uint32)
        # half of 2^(scale - 127): never infinite, subnormal for the two smallest scales
        half += (tl.where(scale > 1, (scale - 1) << 23, (scale + 1) << 21).to(tl.float32, bitcast=True),)
    digit = tl.arange(0, 8)
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        code = word[step].to(tl.uint32)[:, None] >> (4 * digit)[None, :].to(tl.uint32)
        value = _twice_e2m1(code) * half[step][:, None]
        if out.dtype.element_ty == tl.bfloat16:  # exact; a conversion may flush subnormals
            value = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(out + index[:, None] * 8 + digit[None, :], value.to(out.dtype.element_ty), mask=is_word[:, None])


@triton.jit
def e4m3_value(code):
    """Convert an E4M3 code to fp32: its exponent and mantissa are moved to those of a tiny fp32."""
    bits = (code & 0x7F) << 20 | (code & 0x80) << 24
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def fp8_scale_row(row, N: tl.constexpr, PARTS: tl.constexpr, KINDS: tl.constexpr, FP8_BLOCK: tl.constexpr):
    """Find the row of an expert's scales, [PARTS, blocks, KINDS] as one dimension, for a row of the weight."""
    ROWS: tl.constexpr = N // PARTS
    BLOCKS: tl.constexpr = (ROWS // KINDS + FP8_BLOCK - 1) // FP8_BLOCK
    return (row // ROWS * BLOCKS + row % ROWS // KINDS // FP8_BLOCK) * KINDS + row % KINDS


@triton.jit
def fp8_scale_value(scale):
    """Convert a scale of FP8 to fp32: a byte to 2^(scale - 127)."""
    if scale.dtype == tl.float32:
        return scale
    else:
        bits = scale.to(tl.uint32)
        return tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def dequantize_fp8_kernel(
    words,
    scales,
    out,
    offsets,
    WORDS_PER_EXPERT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALES_PER_EXPERT: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    FP8_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Dequantize STEPS * WORDS pairs of words of one expert, each four codes."""
    programs: tl.constexpr = (WORDS_PER_EXPERT + WORDS * STEPS - 1) // (WORDS * STEPS)
    expert = tl.program_id(0) // programs
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        return
    first = tl.program_id(0) % programs * (WORDS * STEPS)
    words += expert.to(tl.int64) * (2 * WORDS_PER_EXPERT)
    out += expert.to(tl.int64) * (8 * WORDS_PER_EXPERT)
    scales += expert.to(tl.int64) * SCALES_PER_EXPERT
    BLOCKS: tl.constexpr = (K + FP8_BLOCK - 1) // FP8_BLOCK
    word = ()
    factor = ()
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        word += (tl.load(words + index[:, None] * 2 + tl.arange(0, 2)[None, :], mask=is_word[:, None], other=0),)
        scale = fp8_scale_row(index // (K // 8), N, PARTS, KINDS, FP8_BLOCK) * BLOCKS
        scale += index % (K // 8) * 8 // FP8_BLOCK
        factor += (fp8_scale_value(tl.load(scales + scale, mask=is_word, other=0)),)
    digit = tl.arange(0, 8)
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        code = word[step].to(tl.uint32)[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :].to(tl.uint32)
        value = e4m3_value(tl.reshape(code, (WORDS, 8))) * factor[step][:, None]
        tl.store(out + index[:, None] * 8 + digit[None, :], value.to(out.dtype.element_ty), mask=is_word[:, None])


@triton.jit
def dequantize_nvfp4_kernel(
    words,
    scales,
    state,
    out,
    offsets,
    WORDS_PER_EXPERT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    WORDS_PER_SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Dequantize STEPS * WORDS words of one expert, the first value of a byte in its low half."""
    programs: tl.constexpr = (WORDS_PER_EXPERT + WORDS * STEPS - 1) // (WORDS * STEPS)
    expert = tl.program_id(0) // programs
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        return
    first = tl.program_id(0) % programs * (WORDS * STEPS)
    words += expert.to(tl.int64) * WORDS_PER_EXPERT
    out += expert.to(tl.int64) * (8 * WORDS_PER_EXPERT)
    scales += expert.to(tl.int64) * (WORDS_PER_EXPERT // WORDS_PER_SCALE)
    word = ()
    half = ()
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        word += (tl.load(words + index, mask=is_word, other=0),)
        scale = tl.load(scales + index // WORDS_PER_SCALE, mask=is_word, other=0)
        row = index // (K // 8)
        whole = tl.load(state + expert * (PARTS * KINDS) + row // (N // PARTS) * KINDS + row % KINDS, mask=is_word)
        half += (e4m3_value(scale.to(tl.uint32)) * whole * 0.5,)
    digit = tl.arange(0, 8)
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        code = word[step].to(tl.uint32)[:, None] >> (4 * digit)[None, :].to(tl.uint32)
        value = _twice_e2m1(code) * half[step][:, None]
        tl.store(out + index[:, None] * 8 + digit[None, :], value.to(out.dtype.element_ty), mask=is_word[:, None])


@triton.jit
def dequantize_int4_kernel(
    words,
    scales,
    zeros,
    out,
    offsets,
    WORDS_PER_EXPERT: tl.constexpr,
    WORDS_PER_SCALE: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Dequantize STEPS * WORDS words of one expert, the first value of a byte in its low half; zeros: None where all are
    8."""
    programs: tl.constexpr = (WORDS_PER_EXPERT + WORDS * STEPS - 1) // (WORDS * STEPS)
    expert = tl.program_id(0) // programs
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        return
    first = tl.program_id(0) % programs * (WORDS * STEPS)
    words += expert.to(tl.int64) * WORDS_PER_EXPERT
    out += expert.to(tl.int64) * (8 * WORDS_PER_EXPERT)
    scales += expert.to(tl.int64) * (WORDS_PER_EXPERT // WORDS_PER_SCALE)
    if zeros is not None:
        zeros += expert.to(tl.int64) * (WORDS_PER_EXPERT // WORDS_PER_SCALE)
    word = ()
    scale = ()
    zero = ()
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        word += (tl.load(words + index, mask=is_word, other=0),)
        scale += (tl.load(scales + index // WORDS_PER_SCALE, mask=is_word, other=0.0).to(tl.float32),)
        if zeros is not None:
            zero += (tl.load(zeros + index // WORDS_PER_SCALE, mask=is_word, other=0).to(tl.int32),)
        else:
            zero += (tl.full((WORDS,), 8, tl.int32),)
    digit = tl.arange(0, 8)
    for step in tl.static_range(STEPS):
        index = first + step * WORDS + tl.arange(0, WORDS)
        is_word = index < WORDS_PER_EXPERT
        code = (word[step].to(tl.uint32)[:, None] >> (4 * digit)[None, :].to(tl.uint32)) & 15
        value = (code.to(tl.int32) - zero[step][:, None]).to(tl.float32) * scale[step][:, None]
        tl.store(out + index[:, None] * 8 + digit[None, :], value.to(out.dtype.element_ty), mask=is_word[:, None])


def words_of(codes):
    """View codes as int32, copied where they do not start at a multiple of 16 bytes."""
    return (codes.clone() if codes.data_ptr() % 16 else codes).view(torch.int32)


def dequantize(codes, scales, state, name, dtype, rows):
    packed = Quantized(codes, scales, state)
    num_experts, size_out, size_in = FORMATS[name].shape(packed)
    weight_ENK = codes.new_empty(num_experts, size_out, size_in, dtype=dtype)
    words_per_expert = size_out * size_in // CODES
    grid = (num_experts * cdiv(words_per_expert, WORDS * STEPS),)
    words_per_scale, order = FORMATS[name].group(packed) // CODES, FORMATS[name].parts_and_kinds(packed)
    constants: tuple[int, ...] = (words_per_expert, words_per_scale, WORDS, STEPS)
    sizes = words_per_expert, size_out, size_in
    if name == "mxfp4":
        tensors = words_of(codes), scales, weight_ENK, rows.offsets
        launch_kernel(dequantize_mxfp4_kernel, grid, tensors, (), constants, num_warps=WARPS)
    elif name == "fp8":
        tensors = words_of(codes), scales, weight_ENK, rows.offsets
        constants = (*sizes, scales[0].numel(), *order, FP8_BLOCK, WORDS, STEPS)
        launch_kernel(dequantize_fp8_kernel, grid, tensors, (), constants, num_warps=WARPS)
    elif name == "nvfp4":
        tensors = words_of(codes), scales, state, weight_ENK, rows.offsets
        constants = (*sizes, *order, words_per_scale, WORDS, STEPS)
        launch_kernel(dequantize_nvfp4_kernel, grid, tensors, (), constants, num_warps=WARPS)
    elif name in ("int4", "uint4"):
        tensors = words_of(codes), scales, state, weight_ENK, rows.offsets
        launch_kernel(dequantize_int4_kernel, grid, tensors, (), constants, num_warps=WARPS)
    else:
        constants += (VALUE_MAP.start, SCALE_OFFSET, SCALE_SCALES.start, SCALES_PER_SCALE)
        tensors = words_of(codes), scales, state, weight_ENK, rows.offsets
        launch_kernel(dequantize_nf4_kernel, grid, tensors, (), constants, num_warps=WARPS, enable_fp_fusion=False)
    return weight_ENK
