"""up and down of a few rows per expert, with weights read as they are packed: then bandwidth is everything.

The weight is the left side of the products, whose tiles are [weight rows, rows]: tensor cores take 16 of the former and
as few as 8 of the latter. Each warp multiplies weight rows of its own (a batch of products, one a warp), so that nothing
changes threads between memory and tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..interface import Activation, PackedOperand
from ..packed import FORMATS, Quantized
from .activations import activate, activate_ungated
from .config import is_interpreted, max_row_tiles, packed_blocks
from .dequantize import words_of
from .gemm_common import T_DEPENDENT, bias_strides, lora_operands
from .launch import cdiv, launch_kernel
from .packed_product import packed_linear
from .packed_tile import nf4_table

# columns that a product takes at a time
STEP = {"nf4": 256} | dict.fromkeys(("mxfp4", "fp8", "nvfp4", "int4", "uint4"), 128)


@triton.jit(do_not_specialize=T_DEPENDENT)
def gemm_packed_kernel(
    x,
    words,
    scales,
    state,
    bias,
    shrunk,
    factor,
    h,
    a,
    token,
    tiles,
    num_row_tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    PARTS: tl.constexpr,
    KINDS: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr,
    BIAS_STRIDE_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    J: tl.constexpr,
    FACTOR_STRIDE_E: tl.constexpr,
    FACTOR_STRIDE_N: tl.constexpr,
    FACTOR_STRIDE_J: tl.constexpr,
    NAME: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    HEIGHT: tl.constexpr,
    WARPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute h[r] = x[token[r]] @ weight[e]^T (+ shrunk[r] @ factor[e]^T) (+ bias[e]) and a[r] = act(h[r]). token: None
    where x is in the order of rows. INTERLEAVED: None where the activation has no gate."""
    GATED: tl.constexpr = INTERLEAVED is not None
    WIDTH: tl.constexpr = 2 * I if GATED else I
    GATE_UP_ORDER: tl.constexpr = None if not GATED else "interleaved" if INTERLEAVED else "concatenated"
    COLUMNS: tl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    column_tiles: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    row_tile, tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert = tl.load(tiles + row_tile * 3)
    if expert < 0:
        return
    table = nf4_table(state, INTERPRETED) if FORMAT == "nf4" else 0
    end = tl.load(tiles + row_tile * 3 + 2)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(tl.load(tiles + row_tile * 3 + 1), end, 8):
        product = packed_linear(
            x,
            token,
            words,
            scales,
            state,
            table,
            bias,
            shrunk,
            factor,
            expert,
            tile,
            first,
            end,
            WIDTH,
            H,
            FORMAT,
            GROUP,
            STEP,
            PARTS,
            KINDS,
            BIAS_STRIDE_E,
            BIAS_STRIDE_N,
            J,
            FACTOR_STRIDE_E,
            FACTOR_STRIDE_N,
            FACTOR_STRIDE_J,
            GATE_UP_ORDER,
            HEIGHT,
            WARPS,
            INTERPRETED,
        )
        if GATED:
            gates_ups = tl.permute(tl.reshape(product, (HEIGHT // 16, 2, 8, 8)), (0, 2, 3, 1))
            gate, up = tl.split(tl.reshape(gates_ups, (COLUMNS, 8, 2)))
        row = first + tl.arange(0, 8)
        is_stored = (row < end)[None, :] & (column < I)[:, None]
        long_row = row.to(tl.int64)[None, :]
        if h is not None:
            h_pointers = h + long_row * WIDTH + (2 * column if INTERLEAVED else column)[:, None]
            tl.store(h_pointers, (gate if GATED else product).to(h.dtype.element_ty), mask=is_stored)
            if GATED:
                tl.store(h_pointers + (1 if INTERLEAVED else I), up.to(h.dtype.element_ty), mask=is_stored)
        if a is not None:
            if GATED:
                activated, _, _ = activate(gate, up, 1.0, NAME, ALPHA, LIMIT)
            else:
                activated, _ = activate_ungated(product, 1.0, NAME)
            tl.store(a + long_row * I + column[:, None], activated.to(a.dtype.element_ty), mask=is_stored)


def _launch(x, weight: PackedOperand, bias, rows, token, h, a, inner: int, interleaved, activation, lora) -> None:
    """Fill h and a, of which one may be None, from rows of x, or those that `token` names."""
    codes, scales, state, name = weight
    packed = Quantized(codes, scales, state)
    num_pairs, num_experts = rows.token.numel(), rows.offsets.numel() - 1
    if not num_pairs:
        return
    _, width, hidden = FORMATS[name].shape(packed)
    blocks = packed_blocks(name, x, num_pairs, num_experts)
    row_tiles = max_row_tiles(num_pairs, num_experts)
    lora_tensors, lora_constants = lora_operands(lora)
    launch_kernel(
        gemm_packed_kernel,
        (row_tiles * cdiv(width, blocks.height),),
        (x, words_of(codes), scales, state, bias, *lora_tensors, h, a, token, rows.tiles),
        (row_tiles,),
        (
            hidden,
            inner,
            name,
            FORMATS[name].group(packed),
            STEP[name],
            *FORMATS[name].parts_and_kinds(packed),
            *bias_strides(bias),
            interleaved,
            *lora_constants,
            *activation,
            blocks.height,
            blocks.warps,
            is_interpreted(x.device),
        ),
        num_warps=blocks.warps,
        num_stages=1,
        maxnreg=blocks.registers,
    )


def packed_up(x_TH, gate_up: PackedOperand, bias_E2I, rows, activation, interleaved, want_h, want_a, lora=None):
    """Compute `up` with a packed weight."""
    num_rows, (_, width, _) = rows.token.numel(), FORMATS[gate_up.format].shape(Quantized(*gate_up[:3]))
    inner = activation.inner(width)
    h_R2I = x_TH.new_empty(num_rows, width) if want_h else None
    a_RI = x_TH.new_empty(num_rows, inner) if want_a else None
    order = interleaved if activation.is_gated else None
    _launch(x_TH, gate_up, bias_E2I, rows, rows.token, h_R2I, a_RI, inner, order, activation, lora)
    return h_R2I, a_RI


def packed_down(a_RI, down: PackedOperand, bias_EH, rows, lora=None):
    """Compute `down` with a packed weight: it is the h of an `up` without a gate, whose a is not wanted."""
    num_rows, (_, columns, _) = rows.token.numel(), FORMATS[down.format].shape(Quantized(*down[:3]))
    out_RN = a_RI.new_empty(num_rows, columns)
    _launch(a_RI, down, bias_EH, rows, None, out_RN, None, columns, None, Activation("relu"), lora)
    return out_RN
