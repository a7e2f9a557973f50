"""The backend in the CuTe DSL: Hopper GPUs (sm_90a), bf16 and fp16; the signatures are in ../interface.py.

What these kernels do not take (sizes up to 64 or no multiple of 8, weights with gaps), or take more slowly (up and
down_backward of few rows per expert), runs on the Triton kernels, which also dispatch, combine and sum bias gradients for
this backend.
"""

import functools

import torch

from .. import triton as portable
from ..triton import combine as combine
from ..triton import dequantize as dequantize
from ..triton import dispatch as dispatch
from ..triton import down_bias_gradient as down_bias_gradient
from ..triton import factor_gradient as factor_gradient
from ..triton import gate_up_bias_gradient as gate_up_bias_gradient
from ..triton import rank_backward as rank_backward
from ..triton import rank_rows as rank_rows
from ..triton import round_rows as round_rows
from ..triton import round_rows_backward as round_rows_backward
from ..triton import tile_table_length as tile_table_length
from ..triton.config import TILE, max_row_tiles, num_sms, tile_rows
from .configs import gradient_tiles, product_tiles, row_bucket, short, takes, tile
from .variants import of_step

DTYPES = (torch.bfloat16, torch.float16)
MOST_ELEMENTS = 1 << 31  # offsets into a gathered tensor, and into the parts of dw, are 32-bit


@functools.cache
def _compiled():
    """Imports the kernels when the first is launched, not before."""
    from . import compiled

    return compiled


def _fits(rows, sizes, gathered, *others) -> bool:
    """Whether the Hopper kernels take these operands, of these sizes H, I or 2I; `gathered`, whose rows an index names,
    may be None."""
    if not rows.token.numel() or not takes(*sizes):
        return False
    if gathered is not None and gathered.numel() >= MOST_ELEMENTS:
        return False
    operands = others if gathered is None else (gathered, *others)
    return all(tensor.dtype in DTYPES and tensor.data_ptr() % 16 == 0 for tensor in operands)


def _few(rows) -> bool:
    """Whether experts have so few rows that dispatch cuts tiles of 64: gathering 128 costs more than it brings."""
    return tile_rows(rows.token.numel(), rows.offsets.numel() - 1) < TILE


def _dense(weight) -> bool:
    """Whether a [E, M, N] view is stored without gaps, as [E, M, N] or [E, N, M]."""
    _, height, width = weight.shape
    strides = (height * width, width, 1), (height * width, 1, height)
    return weight.stride() in strides or weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()


def _tiles(rows, tensor):
    """The table of tiles, its row that holds their number and the counter of claimed work, and the number of blocks."""
    last = max_row_tiles(rows.token.numel(), rows.offsets.numel() - 1)
    return rows.tiles, last, num_sms(tensor.device)


@functools.cache
def _of_tiles(compile_kernel, tiles, *parameters):
    """The kernel of each of the tiles: all at once, so that another number of rows compiles nothing."""
    return [compile_kernel(*parameters, tile) for tile in tiles]


@functools.cache
def _first(compile_kernel, *parameters):
    """The kernel of `up`, with which a step begins: those that follow are compiled beside it where the cache is empty."""
    from .cache import compile_ahead

    compile_ahead(of_step(*parameters))
    return compile_kernel(*parameters)


def _launch(kernel, tensor, *arguments):
    """Launch on the tensor's GPU, which need not be the current one."""
    if tensor.get_device() == torch.cuda.current_device():
        kernel(tensor, *arguments)
    else:
        with torch.cuda.device_of(tensor):
            kernel(tensor, *arguments)


def up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, extra=None):
    _, width, hidden = gate_up_E2IH.shape
    sizes = (hidden, width // 2)
    taken = extra is None and _fits(rows, sizes, x_TH, gate_up_E2IH) and _dense(gate_up_E2IH)
    if _few(rows) or not taken:
        return portable.up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, extra)
    num_pairs = rows.token.numel()
    h_R2I = x_TH.new_empty(num_pairs, width) if want_h else None
    a_RI = x_TH.new_empty(num_pairs, width // 2) if want_a else None
    kernel = _first(
        _compiled().up, x_TH.dtype, hidden, width // 2, gate_up_E2IH.stride(2) == 1, bias_E2I is not None, want_h,
        want_a, activation, interleaved, tile("up", width),
    )  # fmt: skip
    _launch(kernel, x_TH, gate_up_E2IH, bias_E2I, h_R2I, a_RI, rows.token, *_tiles(rows, x_TH))
    return h_R2I, a_RI


def _product(fallback, source_RK, weight_ENK, bias_EN, rows, extra):
    if (
        extra is not None
        or not _fits(rows, weight_ENK.shape[1:], None, source_RK, weight_ENK)
        or not _dense(weight_ENK)
    ):
        return fallback()
    (num_rows, _), (num_experts, columns, depth) = source_RK.shape, weight_ENK.shape
    out_RN = source_RK.new_empty(num_rows, columns)
    kernels = _of_tiles(
        _compiled().product, product_tiles(columns, depth), source_RK.dtype, columns, depth,
        weight_ENK.stride(2) == 1, bias_EN is not None,
    )  # fmt: skip
    kernel = kernels[row_bucket(num_rows, num_experts)]
    _launch(kernel, source_RK, weight_ENK, bias_EN, out_RN, rows.token, *_tiles(rows, source_RK))
    return out_RN


def down(a_RI, down_EHI, bias_EH, rows, extra=None):
    return _product(lambda: portable.down(a_RI, down_EHI, bias_EH, rows, extra), a_RI, down_EHI, bias_EH, rows, extra)


def input_rows(dh_R2I, gate_up_E2IH, rows, extra=None):
    return _product(
        lambda: portable.input_rows(dh_R2I, gate_up_E2IH, rows, extra),
        dh_R2I, gate_up_E2IH.transpose(1, 2), None, rows, extra,
    )  # fmt: skip


def down_backward(
    dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw, extra=None
):
    num_pairs, (_, hidden, inner) = rows.token.numel(), down_EHI.shape
    chosen = tile("down_backward", inner)
    num_parts = -(-inner // chosen.columns)
    taken = _fits(rows, (hidden, inner), dout_TH, down_EHI, h_R2I) and num_parts * num_pairs < MOST_ELEMENTS
    if _few(rows) or extra is not None or not taken or not _dense(down_EHI):
        return portable.down_backward(
            dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw, extra
        )
    dh_R2I = torch.empty_like(h_R2I) if want_dh else None
    a_RI = h_R2I.new_empty(num_pairs, inner) if want_a else None
    parts = weight_P.new_empty(num_parts, num_pairs) if want_dw else None
    kernel = _compiled().down_backward(
        dout_TH.dtype, hidden, inner, down_EHI.stride(1) == 1, want_dh, want_a, want_dw, activation,
        interleaved, chosen,
    )  # fmt: skip
    _launch(
        kernel, dout_TH, down_EHI.transpose(1, 2), h_R2I, weight_P, dh_R2I, a_RI, parts, rows.pair, rows.token,
        *_tiles(rows, dout_TH),
    )  # fmt: skip
    return dh_R2I, a_RI, portable.routing_gradient(parts, dout_TH, bias_EH, rows) if want_dw else None


def _gradient(fallback, gathered_TN, direct_RM, rows, like_EMN):
    """sum over rows of direct^T gathered[token], in the strides of `like_EMN`."""
    if not _fits(rows, like_EMN.shape[1:], gathered_TN, direct_RM) or not _dense(like_EMN):
        return fallback()
    gradient = torch.empty_like(like_EMN)
    num_experts, height, width = gradient.shape
    kernels = _of_tiles(
        _compiled().gradient, gradient_tiles(width), gathered_TN.dtype, height, width, gradient.stride(2) == 1
    )
    kernel = kernels[short(rows.token.numel(), num_experts)]
    _launch(kernel, gathered_TN, direct_RM, gradient, rows.token, rows.offsets, *_tiles(rows, direct_RM))
    return gradient


def gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH):
    return _gradient(lambda: portable.gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH), x_TH, dh_R2I, rows, like_E2IH)


def down_gradient(dout_TH, a_RI, rows, like_EHI):
    return _gradient(
        lambda: portable.down_gradient(dout_TH, a_RI, rows, like_EHI).transpose(1, 2),
        dout_TH, a_RI, rows, like_EHI.transpose(1, 2),
    ).transpose(1, 2)  # fmt: skip
