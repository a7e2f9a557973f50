"""up and down of a few rows per expert, with weights read in 4 bits: then bandwidth is everything.

The weight is the left side of the products, whose tiles are [weight rows, rows]: tensor cores take 16 of the former and
as few as 8 of the latter. Each warp multiplies weight rows of its own (a batch of products, one a warp), so that nothing
changes threads between memory and tensor cores.
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
from .packed_tile import NF4_FACTOR, gathered, half_scale, in_order_of_words, table_of_pairs, unpacked

_SCALE_OFFSET, _SCALE_SCALES = tl.constexpr(SCALE_OFFSET), tl.constexpr(SCALE_SCALES.start)
_SCALES_PER_SCALE, _NF4_FACTOR = tl.constexpr(SCALES_PER_SCALE), tl.constexpr(NF4_FACTOR)


@triton.jit
def _weight_row(place, tile, N: tl.constexpr, HEIGHT: tl.constexpr, PAIRS: tl.constexpr):
    """The weight's rows at places of a tile: in their order, or of pairs eight gates, then their eight ups, and so on:
    on tensor cores a thread has both of a pair. Past the end the last rows again."""
    if PAIRS is None:
        return tl.minimum(tile * HEIGHT + place, N - 1)
    else:
        pair = tl.minimum(tile * (HEIGHT // 2) + place // 16 * 8 + place % 8, N // 2 - 1)
        is_up = place // 8 % 2
        return 2 * pair + is_up if PAIRS == "interleaved" else pair + is_up * (N // 2)


@triton.jit
def _scales_of_group(
    scales, state, weight_row, expert, start, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """fp32 [rows, 4]: what the sums of four blocks from `start` on are multiplied by."""
    block = start // BLOCK + tl.arange(0, 4)[None, :]
    row_block = weight_row[:, None] * (K // BLOCK)
    code_pointers = scales + expert.to(tl.int64) * (N * (K // BLOCK)) + row_block + block
    code = tl.load(code_pointers) if K % (4 * BLOCK) == 0 else tl.load(code_pointers, mask=block < K // BLOCK, other=0)
    if FORMAT == "nf4":
        of_scale = expert * (N * (K // BLOCK)) + row_block + tl.minimum(block, K // BLOCK - 1)
        of_scale = gathered(state + _SCALE_SCALES, of_scale // _SCALES_PER_SCALE, INTERPRETED)
        scale = gathered(state, code.to(tl.int32), INTERPRETED) * of_scale + tl.load(state + _SCALE_OFFSET)
        return scale * _NF4_FACTOR
    else:
        return half_scale(code.to(tl.int32))


@triton.jit
def _words_of_group(words, weight_row, expert, at, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [rows, BLOCK / 8], those of a block."""
    row_words = words + expert.to(tl.int64) * (N * (K // 8)) + weight_row[:, None] * (K // 8)
    return tl.load(row_words + tl.arange(0, BLOCK // 8)[None, :] + at // 8)


@triton.jit
def _by_warp(groups):
    """Two or four tensors [8 WARPS, A] as one [WARPS, 8 GROUPS, A]: a warp's rows are those of all groups."""
    WARPS: tl.constexpr = groups[0].shape[0] // 8
    A: tl.constexpr = groups[0].shape[1]
    if len(groups) == 2:
        joined = tl.permute(tl.reshape(tl.join(groups[0], groups[1]), (WARPS, 8, A, 2)), (0, 3, 1, 2))
        return tl.reshape(joined, (WARPS, 16, A))
    else:
        joined = tl.join(tl.join(groups[0], groups[2]), tl.join(groups[1], groups[3]))
        return tl.reshape(tl.permute(tl.reshape(joined, (WARPS, 8, A, 4)), (0, 3, 1, 2)), (WARPS, 32, A))


@triton.jit
def _words_of_block(words, weight_rows, expert, at, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [WARPS, 8 GROUPS, BLOCK / 8]."""
    groups = ()
    for group in tl.static_range(len(weight_rows)):
        groups += (_words_of_group(words, weight_rows[group], expert, at, N, K, BLOCK),)
    return _by_warp(groups)


@triton.jit
def _four_blocks(
    words, scales, state, weight_rows, expert, start, N: tl.constexpr, K: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The scales [WARPS, 8 GROUPS, 4] of four blocks from `start` on, and their words; past the end the last block's."""
    groups = ()
    for group in tl.static_range(len(weight_rows)):
        groups += (_scales_of_group(scales, state, weight_rows[group], expert, start, N, K, FORMAT, BLOCK, INTERPRETED),)
    four = ()
    for block in tl.static_range(4):
        at = start + block * BLOCK
        at = at if K % (4 * BLOCK) == 0 else tl.minimum(at, K - BLOCK)
        four += (_words_of_block(words, weight_rows, expert, at, N, K, BLOCK),)
    return _by_warp(groups), four


@triton.jit
def _packed_product(
    x_row, words, scales, state, table, expert, tile, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, HEIGHT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """weight @ x^T [HEIGHT, 8] in fp32; x_row [8 WARPS] points to the rows of x [8, K], WARPS times.

    A warp has HEIGHT / WARPS rows of the weight, and all of x. As tensor cores lay a tile out, four lanes have every
    eighth row; a lane loads a fourth of each block of BLOCK values that share a scale, and of four blocks one scale.
    """
    GROUPS: tl.constexpr = HEIGHT // WARPS // 8
    EACH: tl.constexpr = BLOCK // 32  # words of a block that a lane loads
    slot = tl.arange(0, WARPS * 8)
    place = slot // 8 * (GROUPS * 8) + slot % 8
    column = tl.arange(0, 32)
    x_pointers = x_row[:, None] + (column // 8 * (8 * EACH) + column % 8)[None, :]
    weight_rows = ()
    for group in tl.static_range(GROUPS):
        weight_rows += (_weight_row(place + 8 * group, tile, N, HEIGHT, PAIRS),)
    product = tl.zeros((WARPS, GROUPS * 8, 4, 2), tl.float32)
    if AHEAD:
        scale, four = _four_blocks(words, scales, state, weight_rows, expert, 0, N, K, FORMAT, BLOCK, INTERPRETED)
    for start in range(0, K, 4 * BLOCK):
        if AHEAD:
            following = tl.minimum(start + 4 * BLOCK, (K - 1) // (4 * BLOCK) * (4 * BLOCK))
            next_scale, next_four = _four_blocks(
                words, scales, state, weight_rows, expert, following, N, K, FORMAT, BLOCK, INTERPRETED
            )
        else:
            scale, four = _four_blocks(
                words, scales, state, weight_rows, expert, start, N, K, FORMAT, BLOCK, INTERPRETED
            )
        for block in tl.static_range(4):
            at = start + block * BLOCK
            if K % (4 * BLOCK) == 0 or block == 0 or at < K:
                product = _add_block(product, x_pointers + at, four[block], scale, block, table, state, FORMAT, INTERPRETED)
        if AHEAD:
            scale, four = next_scale, next_four
    return tl.reshape(product, (HEIGHT, 8))


@triton.jit
def _add_block(
    product, x_pointers, word, scale, block: tl.constexpr, table, state, FORMAT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """product + that of a block of K, which is one of four whose scales are `scale`."""
    WARPS: tl.constexpr = product.shape[0]
    TALL: tl.constexpr = product.shape[1]
    EACH: tl.constexpr = word.shape[2] // 4
    word = tl.reshape(word, (WARPS, TALL, 4, EACH))
    part = tl.zeros((WARPS, TALL, 8), tl.float32)
    for which in tl.static_range(EACH):
        x = tl.reshape(tl.load(x_pointers + 8 * which), (WARPS, 8, 4, 8))
        x = tl.permute(tl.reshape(in_order_of_words(x), (WARPS, 8, 32)), (0, 2, 1))
        one = tl.reshape(word, (WARPS, TALL, 4)) if EACH == 1 else tl.split(word)[which]
        part = tl.dot(unpacked(one, table, state, FORMAT, x.dtype, INTERPRETED), x, part)
    scale = tl.gather(scale, tl.full(scale.shape, block, tl.int32), 2)  # among four lanes
    return product + tl.reshape(part, (WARPS, TALL, 4, 2)) * scale[:, :, :, None]


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


@triton.jit
def _packed_linear(
    x, token, words, scales, state, table, bias, rank, factor, expert, tile, first, end,
    N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr,
    J: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr,
    PAIRS: tl.constexpr, HEIGHT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """weight[e] @ x[token[r]]^T (+ factor[e] @ rank[r]^T) (+ bias[e]) [HEIGHT, 8] in fp32, r = first, first + 1, ...

    PAIRS: the order of the weight's rows, as in `_weight_row`.
    """
    # past the end the last row again
    source = tl.minimum(first + tl.arange(0, WARPS * 8) % 8, end - 1)
    if token is not None:
        source = tl.load(token + source)
    product = _packed_product(
        x + source.to(tl.int64) * K, words, scales, state, table, expert, tile,
        N, K, FORMAT, BLOCK, PAIRS, HEIGHT, WARPS, AHEAD, INTERPRETED,
    )  # fmt: skip
    weight_row = _weight_row(tl.arange(0, HEIGHT), tile, N, HEIGHT, PAIRS)
    product = _add_extra(
        product, rank, factor, expert, tl.minimum(first + tl.arange(0, 8), end - 1), weight_row,
        J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J,
    )  # fmt: skip
    if bias is not None:
        bias_row = bias + expert.to(tl.int64) * BIAS_STRIDE_E + weight_row * BIAS_STRIDE_N
        product += tl.load(bias_row).to(tl.float32)[:, None]
    return product


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_packed_up_kernel(
    x, words, scales, state, bias, rank, factor, h, a, token, tiles, num_row_tiles,
    H: tl.constexpr, I: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_N: tl.constexpr, INTERLEAVED: tl.constexpr,
    J: tl.constexpr, FACTOR_STRIDE_E: tl.constexpr, FACTOR_STRIDE_N: tl.constexpr, FACTOR_STRIDE_J: tl.constexpr,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    HEIGHT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """h[r] = x[token[r]] @ weight[e]^T (+ rank[r] @ factor[e]^T) (+ bias[e]) and a[r] = act(h[r])."""
    COLUMNS: tl.constexpr = HEIGHT // 2
    column_tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    row_tile, tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert = tl.load(tiles + row_tile * 3)
    if expert < 0:
        return
    table = table_of_pairs(FORMAT, INTERPRETED)
    end = tl.load(tiles + row_tile * 3 + 2)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(tl.load(tiles + row_tile * 3 + 1), end, 8):
        product = _packed_linear(
            x, token, words, scales, state, table, bias, rank, factor, expert, tile, first, end,
            2 * I, H, FORMAT, BLOCK, BIAS_STRIDE_E, BIAS_STRIDE_N, J, FACTOR_STRIDE_E, FACTOR_STRIDE_N,
            FACTOR_STRIDE_J, "interleaved" if INTERLEAVED else "concatenated", HEIGHT, WARPS, AHEAD, INTERPRETED,
        )  # fmt: skip
        product = tl.permute(tl.reshape(product, (HEIGHT // 16, 2, 8, 8)), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(product, (COLUMNS, 8, 2)))
        row = first + tl.arange(0, 8)
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
    HEIGHT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[r] = source[r] @ weight[e]^T (+ rank[r] @ factor[e]^T) (+ bias[e])."""
    column_tiles: tl.constexpr = (N + HEIGHT - 1) // HEIGHT
    row_tile, tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert = tl.load(tiles + row_tile * 3)
    if expert < 0:
        return
    table = table_of_pairs(FORMAT, INTERPRETED)
    end = tl.load(tiles + row_tile * 3 + 2)
    column = tile * HEIGHT + tl.arange(0, HEIGHT)
    for first in range(tl.load(tiles + row_tile * 3 + 1), end, 8):
        product = _packed_linear(
            source, None, words, scales, state, table, bias, rank, factor, expert, tile, first, end,
            N, K, FORMAT, BLOCK, BIAS_STRIDE_E, BIAS_STRIDE_N, J, FACTOR_STRIDE_E, FACTOR_STRIDE_N, FACTOR_STRIDE_J,
            None, HEIGHT, WARPS, AHEAD, INTERPRETED,
        )  # fmt: skip
        row = first + tl.arange(0, 8)
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
        self.tile = blocks.columns, blocks.warps, blocks.stages > 1, is_interpreted(tensor.device)
        self.options = {"num_warps": blocks.warps, "num_stages": 1}
        if blocks.depth:
            self.options["maxnreg"] = blocks.depth


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
