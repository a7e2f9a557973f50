"""4-bit weights to floats, at the memory's bandwidth; the formats are in ../quantized.py.

Only experts that have rows are read and written. A multiplication and the addition after it round separately, as in the
packages whose values these must be: fusion of the two is switched off.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantized import FORMATS, SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE, VALUE_MAP, Quantized, weight_shape
from .launch import cdiv, launch_kernel

VALUES = 4096  # of a program
WARPS = 4


@triton.jit
def dequantize_nf4_kernel(
    codes, scales, state, out, offsets,
    BLOCKS_PER_EXPERT: tl.constexpr, BLOCKS: tl.constexpr, BYTES: tl.constexpr, VALUE_MAP: tl.constexpr,
    SCALE_OFFSET: tl.constexpr, SCALE_SCALES: tl.constexpr, SCALES_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """BLOCKS times 2 * BYTES values of one expert, the first of a byte in its high half."""
    programs: tl.constexpr = (BLOCKS_PER_EXPERT + BLOCKS - 1) // BLOCKS
    expert = tl.program_id(0) // programs
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        return
    in_expert = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
    is_block = in_expert < BLOCKS_PER_EXPERT
    block = expert.to(tl.int64) * BLOCKS_PER_EXPERT + in_expert
    scale = tl.load(state + tl.load(scales + block, mask=is_block, other=0).to(tl.int32))
    absmax = scale * tl.load(state + SCALE_SCALES + block // SCALES_PER_SCALE, mask=is_block, other=0.0)
    absmax += tl.load(state + SCALE_OFFSET)
    place = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(codes + place, mask=is_block[:, None], other=0).to(tl.int32)
    first = tl.load(state + VALUE_MAP + (byte >> 4))
    second = tl.load(state + VALUE_MAP + (byte & 15))
    value = tl.interleave(first, second) * absmax[:, None]
    place = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_block[:, None])


@triton.jit
def _twice_e2m1(code):
    """Twice the value of an E2M1 code: its exponent and mantissa stand where those of a tiny fp32 do."""
    bits = (code & 7) << 22 | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2^127


@triton.jit
def dequantize_mxfp4_kernel(
    codes, scales, out, offsets, BLOCKS_PER_EXPERT: tl.constexpr, BLOCKS: tl.constexpr, BYTES: tl.constexpr
):
    """BLOCKS times 2 * BYTES values of one expert, the first of a byte in its low half."""
    programs: tl.constexpr = (BLOCKS_PER_EXPERT + BLOCKS - 1) // BLOCKS
    expert = tl.program_id(0) // programs
    if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
        return
    in_expert = tl.program_id(0) % programs * BLOCKS + tl.arange(0, BLOCKS)
    is_block = in_expert < BLOCKS_PER_EXPERT
    block = expert.to(tl.int64) * BLOCKS_PER_EXPERT + in_expert
    scale = tl.load(scales + block, mask=is_block, other=0).to(tl.uint32)
    # half of 2^(scale - 127): never infinite, subnormal for the two smallest scales
    half = tl.where(scale > 1, (scale - 1) << 23, (scale + 1) << 21).to(tl.float32, bitcast=True)
    place = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(codes + place, mask=is_block[:, None], other=0).to(tl.uint32)
    value = tl.interleave(_twice_e2m1(byte & 15), _twice_e2m1(byte >> 4)) * half[:, None]
    if out.dtype.element_ty == tl.bfloat16:  # exact; a conversion may flush subnormals
        value = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    place = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_block[:, None])


def dequantize(codes, scales, state, name, dtype, rows):
    num_experts, size_out, size_in = weight_shape(Quantized(codes, scales, state), name)
    weight_ENK = codes.new_empty(num_experts, size_out, size_in, dtype=dtype)
    size = FORMATS[name]
    blocks_per_expert, blocks = size_out * size_in // size, VALUES // size
    grid = (num_experts * cdiv(blocks_per_expert, blocks),)
    constants = (blocks_per_expert, blocks, size // 2)
    if name == "mxfp4":
        tensors = codes, scales, weight_ENK, rows.offsets
        launch_kernel(dequantize_mxfp4_kernel, grid, tensors, (), constants, num_warps=WARPS)
    else:
        constants += (VALUE_MAP.start, SCALE_OFFSET, SCALE_SCALES.start, SCALES_PER_SCALE)
        tensors = codes, scales, state, weight_ENK, rows.offsets
        launch_kernel(dequantize_nf4_kernel, grid, tensors, (), constants, num_warps=WARPS, enable_fp_fusion=False)
    return weight_ENK
