"""up and down of a few rows per expert, with weights read in 4 bits: then bandwidth is everything.

The weight is the left side of the products, whose tiles are [weight rows, rows]: tensor cores take 64 of the former and
as few as 16 of the latter. A program takes a tile of weight rows and all rows of a row tile, ROWS at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..interface import PackedOperand
from ..quantized import FORMATS, SCALE_OFFSET, SCALE_SCALES, SCALES_PER_SCALE, Quantized, weight_shape
from .activations import activate
from .config import is_interpreted, max_row_tiles, packed_blocks
from .dequantize import words_of
from .gemm_common import T_DEPENDENT, bias_strides, extra_operands
from .launch import cdiv, launch_kernel
from .packed_tile import half_scale, in_order_of_words, unpacked

_SCALE_OFFSET, _SCALE_SCALES = tl.constexpr(SCALE_OFFSET), tl.constexpr(SCALE_SCALES.start)
_SCALES_PER_SCALE = tl.constexpr(SCALES_PER_SCALE)


@triton.jit
def _packed_product(
    x_row, words, scales, state, expert, weight_row,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """weight[weight_row] @ x^T [HEIGHT, ROWS] in fp32; x_row points to the rows of x [ROWS, K]. BLOCK values share a
    scale. A step takes DEPTH of K: DEPTH / BLOCK blocks, four words of each at a time, which a thread loads at once."""
    BLOCKS: tl.constexpr = DEPTH // BLOCK
    WORDS: tl.constexpr = 4 * BLOCKS
    long_expert = expert.to(tl.int64)
    place = tl.arange(0, WORDS)
    block = tl.arange(0, BLOCKS)
    column = tl.arange(0, 8 * WORDS)
    word_pointers = words + long_expert * (N * (K // 8)) + (
        weight_row[:, None] * (K // 8) + (place // 4 * (BLOCK // 8) + place % 4)[None, :]
    )  # fmt: skip
    row_block = weight_row[:, None] * (K // BLOCK) + block[None, :]
    scale_pointers = scales + long_expert * (N * (K // BLOCK)) + row_block
    x_pointers = x_row[:, None] + (column // 32 * BLOCK + column % 32)[None, :]
    if FORMAT == "nf4":
        offset = tl.load(state + _SCALE_OFFSET)
        row_block += expert * (N * (K // BLOCK))
    product = tl.zeros((HEIGHT, ROWS), tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            code = tl.load(scale_pointers + start // BLOCK)
        else:  # past the end MXFP4's values are 0, NF4's finite, and x's 0
            is_block = (start + block * BLOCK < K)[None, :]
            code = tl.load(scale_pointers + start // BLOCK, mask=is_block, other=0)
        if FORMAT == "nf4":
            of_scale = state + _SCALE_SCALES + (row_block + start // BLOCK) // _SCALES_PER_SCALE
            if K % DEPTH == 0:
                scale = tl.load(state + code.to(tl.uint32)) * tl.load(of_scale) + offset
            else:
                scale = tl.load(state + code.to(tl.uint32)) * tl.load(of_scale, mask=is_block, other=0.0) + offset
        else:
            scale = half_scale(code.to(tl.int32))
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (HEIGHT, BLOCKS, 4)), (HEIGHT, WORDS))
        for part in tl.static_range(BLOCK // 32):
            if K % DEPTH == 0:
                word = tl.load(word_pointers + (start // 8 + 4 * part))
                x = tl.load(x_pointers + (start + 32 * part))
            else:
                is_word = (start + place // 4 * BLOCK < K)[None, :]
                word = tl.load(word_pointers + (start // 8 + 4 * part), mask=is_word, other=0)
                is_column = (start + column // 32 * BLOCK < K)[None, :]
                x = tl.load(x_pointers + (start + 32 * part), mask=is_column, other=0.0)
            values = unpacked(word, scale, state, FORMAT, HEIGHT, WORDS, x.dtype, INTERPRETED)
            x = in_order_of_words(x, FORMAT, ROWS, WORDS)
            product = tl.dot(values, tl.trans(x), product)
    return product


@triton.jit
def _add_extra(
    product, rank, factor, expert, row, weight_row, J: tl.constexpr, STRIDE_E: tl.constexpr, STRIDE_N: tl.constexpr,
    STRIDE_J: tl.constexpr,
):  # fmt: skip
    """product + factor[expert] @ rank[row]^T, rank [P, J], factor [E, N, J]; product itself without an adapter."""
    if rank is not None:
        DEPTH: tl.constexpr = 16 if J <= 16 else 32
        factor_row = factor + expert.to(tl.int64) * STRIDE_E + weight_row[:, None] * STRIDE_N
        rank_row = rank + row.to(tl.int64)[:, None] * J
        for start in tl.range(0, J, DEPTH, num_stages=1):
            j = start + tl.arange(0, DEPTH)
            left = tl.load(factor_row + j[None, :] * STRIDE_J, mask=(j < J)[None, :], other=0.0)
            right = tl.load(rank_row + j[None, :], mask=(j < J)[None, :], other=0.0)
            product = tl.dot(left, tl.trans(right), product)
    return product


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_packed_up_kernel(
    x, words, scales, state, bias, rank, factor, h, a, token, tiles, num_row_tiles,
    H: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr, INTERLEAVED: tl.constexpr,
    J: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """h[r] = x[token[r]] @ weight[e]^T (+ rank[r] @ factor[e]^T) (+ bias[e]) and a[r] = act(h[r])."""
    COLUMNS: tl.constexpr = HEIGHT // 2
    column_tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // column_tiles
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    end = tl.load(tiles + tile * 3 + 2)
    # Eight gates, then their eight ups, and so on: on tensor cores a thread has both of a pair.
    place = tl.arange(0, HEIGHT)
    pair = tl.minimum(tl.program_id(0) % column_tiles * COLUMNS + place // 16 * 8 + place % 8, I - 1)
    is_up = place // 8 % 2
    weight_row = 2 * pair + is_up if INTERLEAVED else pair + is_up * I
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(tl.load(tiles + tile * 3 + 1), end, ROWS):
        row = first + tl.arange(0, ROWS)
        read_row = tl.minimum(row, end - 1)  # past the end the last row again
        source = tl.load(token + read_row).to(tl.int64)
        product = _packed_product(
            x + source * H, words, scales, state, expert, weight_row,
            2 * I, H, FORMAT, BLOCK, ROWS, HEIGHT, DEPTH, INTERPRETED,
        )  # fmt: skip
        product = _add_extra(
            product, rank, factor, expert, read_row, weight_row, J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J
        )
        if bias is not None:
            bias_row = bias + expert.to(tl.int64) * BIAS_STRIDE_E + weight_row * BIAS_STRIDE_N
            product += tl.load(bias_row).to(tl.float32)[:, None]
        product = tl.permute(tl.reshape(product, (HEIGHT // 16, 2, 8, ROWS)), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(product, (COLUMNS, ROWS, 2)))
        is_stored = (row < end)[None, :] & (column < I)[:, None]
        long_row = row.to(tl.int64)[None, :]
        if h is not None:
            h_pointers = h + long_row * (2 * I) + (2 * column if INTERLEAVED else column)[:, None]
            tl.store(h_pointers, gate.to(h.dtype.element_ty), mask=is_stored)
            tl.store(h_pointers + (1 if INTERLEAVED else I), up.to(h.dtype.element_ty), mask=is_stored)
        if a is not None:
            activated, _, _ = activate(gate, up, 1.0, NAME, ALPHA, LIMIT)
            tl.store(a + long_row * I + column[:, None], activated.to(a.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_packed_down_kernel(
    source, words, scales, state, bias, rank, factor, out, tiles, num_row_tiles,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr,
    J: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr,
    ROWS: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[r] = source[r] @ weight[e]^T (+ rank[r] @ factor[e]^T) (+ bias[e])."""
    column_tiles: tl.constexpr = (N + HEIGHT - 1) // HEIGHT
    tile = tl.program_id(0) // column_tiles
    expert = tl.load(tiles + tile * 3)
    if expert < 0:
        return
    end = tl.load(tiles + tile * 3 + 2)
    column = tl.program_id(0) % column_tiles * HEIGHT + tl.arange(0, HEIGHT)
    weight_row = tl.minimum(column, N - 1)
    for first in range(tl.load(tiles + tile * 3 + 1), end, ROWS):
        row = first + tl.arange(0, ROWS)
        read_row = tl.minimum(row, end - 1)
        product = _packed_product(
            source + read_row.to(tl.int64) * K, words, scales, state, expert, weight_row,
            N, K, FORMAT, BLOCK, ROWS, HEIGHT, DEPTH, INTERPRETED,
        )  # fmt: skip
        product = _add_extra(
            product, rank, factor, expert, read_row, weight_row, J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J
        )
        if bias is not None:
            bias_row = bias + expert.to(tl.int64) * BIAS_STRIDE_E + weight_row * BIAS_STRIDE_N
            product += tl.load(bias_row).to(tl.float32)[:, None]
        out_pointers = out + row.to(tl.int64)[None, :] * N + column[:, None]
        is_stored = (row < end)[None, :] & (column < N)[:, None]
        tl.store(out_pointers, product.to(out.dtype.element_ty), mask=is_stored)


class _PackedPlan:
    """How these kernels are launched: tensors and constants of the weight, the programs, and options."""

    def __init__(self, tensor, weight: PackedOperand, rows):
        codes, scales, state, name = weight
        num_pairs, num_experts = rows.token.numel(), rows.offsets.numel() - 1
        rows_at_once, blocks = packed_blocks(name, tensor, num_pairs, num_experts)
        self.weight = words_of(codes), scales, state
        self.format = name, FORMATS[name]
        self.row_tiles = max_row_tiles(num_pairs, num_experts)
        self.height = blocks.columns
        self.tile = rows_at_once, blocks.columns, blocks.depth, is_interpreted(tensor.device)
        # a scale's product and sum round separately
        self.options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": False}


def packed_up(x_TH, gate_up: PackedOperand, bias_E2I, rows, activation, interleaved, want_h, want_a, extra=None):
    """`up` with a packed weight."""
    num_rows, (_, width, hidden) = rows.token.numel(), weight_shape(Quantized(*gate_up[:3]), gate_up.format)
    h_R2I = x_TH.new_empty(num_rows, width) if want_h else None
    a_RI = x_TH.new_empty(num_rows, width // 2) if want_a else None
    if num_rows:
        plan = _PackedPlan(x_TH, gate_up, rows)
        extra_tensors, extra_constants = extra_operands(extra)
        launch_kernel(
            gemm_packed_up_kernel, (plan.row_tiles * cdiv(width, plan.height),),
            (x_TH, *plan.weight, bias_E2I, *extra_tensors, h_R2I, a_RI, rows.token, rows.tiles), (plan.row_tiles,),
            (hidden, width // 2, *plan.format, *bias_strides(bias_E2I), interleaved, *extra_constants, *activation,
             *plan.tile),
            **plan.options,
        )  # fmt: skip
    return h_R2I, a_RI


def packed_down(a_RI, down: PackedOperand, bias_EH, rows, extra=None):
    """`down` with a packed weight."""
    num_rows, (_, columns, length) = rows.token.numel(), weight_shape(Quantized(*down[:3]), down.format)
    out_RN = a_RI.new_empty(num_rows, columns)
    if num_rows:
        plan = _PackedPlan(a_RI, down, rows)
        extra_tensors, extra_constants = extra_operands(extra)
        launch_kernel(
            gemm_packed_down_kernel, (plan.row_tiles * cdiv(columns, plan.height),),
            (a_RI, *plan.weight, bias_EH, *extra_tensors, out_RN, rows.tiles), (plan.row_tiles,),
            (columns, length, *plan.format, *bias_strides(bias_EH), *extra_constants, *plan.tile), **plan.options,
        )  # fmt: skip
    return out_RN
