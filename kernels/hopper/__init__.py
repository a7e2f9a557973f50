"""The backend in the CuTe DSL: Hopper GPUs (sm_90a), bf16 and fp16; the signatures are in ../interface.py.

Some calls fall back to the Triton kernels: those that these kernels do not support (H or I up to 64 or no multiple of 8,
weights with gaps), and those that they are slower at (up and down_backward with few rows per expert). Dispatch, combine,
token rounding, the bias gradients, and forward's products with packed weights and few rows always run in Triton; with
more rows packed weights are decoded here where a tile is loaded, until expanding them to memory first is faster.
"""

import functools
from typing import NamedTuple

import torch

from .. import triton
from ..interface import PackedOperand
from ..listing import current_list
from ..packed import FORMATS, Quantized
from ..packed.fp8 import FP8_BLOCK
from ..scaled import block_scales, empty_rows
from ..tape import launching
from ..triton import combine as combine
from ..triton import dequantize as dequantize
from ..triton import dispatch as dispatch
from ..triton import down_bias_gradient as down_bias_gradient
from ..triton import gate_up_bias_gradient as gate_up_bias_gradient
from ..triton import lora_a_gradient as lora_a_gradient
from ..triton import lora_b_backward as lora_b_backward
from ..triton import lora_shrink as lora_shrink
from ..triton import reads_packed as reads_packed
from ..triton import reorder as reorder
from ..triton import round_rows as round_rows
from ..triton import round_rows_backward as round_rows_backward
from ..triton import scale_rows as scale_rows
from ..triton import tile_table_length as tile_table_length
from ..triton import transposed as transposed
from ..triton.config import ROW_TILE, num_sms, tile_rows
from ..triton.dequantize import words_of
from .config import (
    ALIGNMENT,
    MAX_DECODED_ROWS,
    PackedKind,
    gemm_down_tiles,
    gemm_wgrad_tiles,
    is_short,
    row_bucket,
    supports_sizes,
    tile,
)
from .config import decodes as decodes_rows
from .variants import training_step_kernels

DTYPES = (torch.bfloat16, torch.float16)
MAX_ELEMENTS = 1 << 31  # offsets into a gathered tensor, and into the partial sums of dw, are 32-bit


@functools.cache
def _compiled():
    """Import the kernels when the first is launched, not before."""
    from . import compiled

    return compiled


def _compiler(name):
    """Look up the function of compiled.py that compiles a kernel, or where kernels are listed make one that lists it."""
    return getattr(_compiled(), name) if current_list() is None else functools.partial(_list, name)


def _list(name, *parameters):
    current_list().hopper.append((name, parameters))


def _fits(rows, sizes, gathered, *others) -> bool:
    """Tell whether the Hopper kernels take these operands, of these sizes H, I or 2I. gathered: the one whose rows an
    index names, or None."""
    if not rows.token.shape[0] or not supports_sizes(*sizes):
        return False
    if gathered is not None and gathered.numel() >= MAX_ELEMENTS:
        return False
    operands = others if gathered is None else (gathered, *others)
    return all(tensor.dtype in DTYPES and tensor.data_ptr() % 16 == 0 for tensor in operands)


def _has_small_tiles(rows) -> bool:
    """Tell whether dispatch cuts row tiles of 64, as it does for few rows an expert: these kernels gather 128, in
    vain."""
    return tile_rows(rows.token.numel(), rows.offsets.numel() - 1) < ROW_TILE


def _is_dense(weight) -> bool:
    """Tell whether a [E, M, N] view is stored without gaps, as [E, M, N] or [E, N, M]."""
    _, height, width = weight.shape
    forms = (height * width, width, 1), (height * width, 1, height)
    return any(all(n == 1 or s == form for n, s, form in zip(weight.shape, weight.stride(), one)) for one in forms)


class _Weight(NamedTuple):
    """A weight [E, N, K] as a kernel takes it. kind: the parameter `weights` of compiled.py. operands: the tensors that
    are passed to the kernel, several of a packed weight. fits: whether the kernels support it."""

    kind: torch.dtype | PackedKind
    operands: tuple
    shape: tuple[int, int, int]
    depth_contiguous: bool
    dtype: torch.dtype
    fits: bool


def _describe_weight(weight, dtype, across=False) -> _Weight:
    """Describe a weight for a product with tensors in this dtype; if `across`, its transpose."""
    if isinstance(weight, PackedOperand):
        packed = Quantized(weight.codes, weight.scales, weight.state)
        format = FORMATS[weight.format]
        experts, size_out, size_in = format.shape(packed)
        kind = PackedKind(weight.format, str(weight.scales.dtype).removeprefix("torch."), format.group(packed))
        words = words_of(weight.codes).view(experts, size_out, size_in // 8)
        shape = (experts, size_in, size_out) if across else (experts, size_out, size_in)
        fits = dtype == torch.bfloat16 and weight.format in MAX_DECODED_ROWS
        return _Weight(kind, (words, weight.scales, weight.state), shape, not across, dtype, fits)
    view = weight.transpose(1, 2) if across else weight
    fits = view.dtype in DTYPES and view.data_ptr() % 16 == 0 and _is_dense(view)
    return _Weight(dtype, (view,), tuple(view.shape), view.stride(2) == 1, view.dtype, fits)


def decodes(weight, dtype, rows, is_expanded=False):
    """Tell as ../interface.py has it whether products decode the weight; by the limits of config.py."""
    packed = Quantized(weight.codes, weight.scales, weight.state)
    experts, *sizes = FORMATS[weight.format].shape(packed)
    is_taken = dtype == torch.bfloat16 and supports_sizes(*sizes)
    return is_taken and decodes_rows(weight.format, rows.token.numel(), experts, is_expanded)


def _expanded(weight, dtype, rows):
    """Expand a weight, if it is packed."""
    if not isinstance(weight, PackedOperand):
        return weight
    return dequantize(weight.codes, weight.scales, weight.state, weight.format, dtype, rows)


def _lora_fits(lora, weight: _Weight) -> bool:
    """Tell whether the Hopper kernels take an interface.LoraTerm, or None, beside this weight."""
    if lora is None:
        return True
    rows, factor = lora
    same_order = (factor.stride(2) == 1) == weight.depth_contiguous
    aligned = rows.shape[1] % ALIGNMENT == 0 and (rows.data_ptr() | factor.data_ptr()) % 16 == 0
    same_dtype = rows.dtype == factor.dtype == weight.dtype
    return same_dtype and aligned and rows.is_contiguous() and same_order and _is_dense(factor)


def _operands(lora):
    """Unpack an adapter into its rows and factor, both None without one."""
    return (None, None) if lora is None else tuple(lora)


def _rank(lora) -> int:
    """Read an adapter's rank, which is 0 without one."""
    return 0 if lora is None else lora.shrunk_PJ.shape[1]


def _schedule(rows, tensor):
    """Make the last arguments of a kernel: tile_table, state_row, num_blocks (gemm_common.py)."""
    return rows.tiles, rows.tiles.shape[0] - 1, num_sms(tensor.device)


@functools.cache
def _compile_for_tiles(compile_kernel, tiles, *parameters):
    """Compile the kernel for each of the tiles: all at once, so that another number of rows compiles nothing."""
    return [compile_kernel(*parameters, tile) for tile in tiles]


@functools.cache
def _compile_up(compile_kernel, *parameters):
    """Compile gemm_up, with which a step begins, and begin to compile the step's other kernels, where the cache has none,
    in other processes meanwhile."""
    if current_list() is None:
        from .cache import compile_ahead

        compile_ahead(training_step_kernels(*parameters))
    return compile_kernel(*parameters)


def _run_on_its_device(kernel, tensor, *arguments):
    """Launch on the tensor's GPU, which need not be the current one; on the meta device not at all."""
    if tensor.is_meta:
        return
    with launching(tensor.get_device()) as recorder:
        kernel(tensor, *arguments)
        if recorder is not None:
            recorder.call(kernel, tensor, *arguments)


def up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, lora=None):
    is_packed = isinstance(gate_up_E2IH, PackedOperand)
    if is_packed and reads_packed(gate_up_E2IH.format, x_TH.dtype, rows):
        return triton.up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, lora)
    weight = _describe_weight(gate_up_E2IH, x_TH.dtype)
    _, width, hidden = weight.shape
    inner = activation.inner(width)
    is_taken = weight.fits and _fits(rows, (hidden, inner), x_TH) and _lora_fits(lora, weight)
    if not is_taken or (not is_packed and _has_small_tiles(rows)):
        gate_up_E2IH = _expanded(gate_up_E2IH, x_TH.dtype, rows)
        return triton.up(x_TH, gate_up_E2IH, bias_E2I, rows, activation, interleaved, want_h, want_a, lora)
    num_pairs = rows.token.numel()
    h_R2I = x_TH.new_empty(num_pairs, width) if want_h else None
    a_RI = x_TH.new_empty(num_pairs, inner) if want_a else None
    kernel = _compile_up(
        _compiler("gemm_up"),
        weight.kind,
        hidden,
        inner,
        weight.depth_contiguous,
        bias_E2I is not None,
        want_h,
        want_a,
        activation,
        interleaved,
        _rank(lora),
        tile("gemm_up", width, weight.kind),
    )
    _run_on_its_device(
        kernel, x_TH, *weight.operands, bias_E2I, *_operands(lora), h_R2I, a_RI, rows.token, *_schedule(rows, x_TH)
    )
    return h_R2I, a_RI


def _product(fallback, source_RK, weight_ENK, across, bias_EN, rows, lora):
    """Compute source[r] @ weight[e]^T, or if `across` source[r] @ weight[e]; `fallback` takes the weight, expanded."""
    weight = _describe_weight(weight_ENK, source_RK.dtype, across)
    if not weight.fits or not _fits(rows, weight.shape[1:], None, source_RK) or not _lora_fits(lora, weight):
        return fallback(_expanded(weight_ENK, source_RK.dtype, rows))
    num_rows, (num_experts, columns, depth) = len(source_RK), weight.shape
    out_RN = source_RK.new_empty(num_rows, columns)
    kernels = _compile_for_tiles(
        _compiler("gemm_down"),
        gemm_down_tiles(columns, depth, weight.kind),
        weight.kind,
        columns,
        depth,
        weight.depth_contiguous,
        bias_EN is not None,
        _rank(lora),
    )
    kernel = kernels[row_bucket(num_rows, num_experts)]
    _run_on_its_device(
        kernel, source_RK, *weight.operands, bias_EN, *_operands(lora), out_RN, rows.token, *_schedule(rows, source_RK)
    )
    return out_RN


def down(a_RI, down_EHI, bias_EH, rows, lora=None):
    if isinstance(down_EHI, PackedOperand) and reads_packed(down_EHI.format, a_RI.dtype, rows):
        return triton.down(a_RI, down_EHI, bias_EH, rows, lora)
    return _product(
        lambda weight: triton.down(a_RI, weight, bias_EH, rows, lora), a_RI, down_EHI, False, bias_EH, rows, lora
    )


def up_backward_input(dh_R2I, gate_up_E2IH, rows, lora=None):
    return _product(
        lambda weight: triton.up_backward_input(dh_R2I, weight, rows, lora),
        dh_R2I,
        gate_up_E2IH,
        True,
        None,
        rows,
        lora,
    )


def _scaled_fits(source, packed, rows, sizes, dtype) -> bool:
    """Tell whether the FP8 kernels take these operands; H and I of an FP8 weight are multiples of 16."""
    if not rows.token.shape[0] or not supports_sizes(*sizes) or dtype != torch.bfloat16:
        return False
    return source.codes.numel() < 2 * MAX_ELEMENTS and (source.codes.data_ptr() | packed.codes.data_ptr()) % 16 == 0


def _e4m3x2(codes):
    """View e4m3 values two by two as bf16, as which the kernels load them."""
    return codes.view(torch.bfloat16)


def scaled_up(x, gate_up, rows, activation, dtype, want_h, want_a, want_scaled, lora=None):
    _, width, hidden = gate_up.codes.shape
    inner = activation.inner(width)
    if not _scaled_fits(x, gate_up, rows, (hidden, inner), dtype):
        return triton.scaled_up(x, gate_up, rows, activation, dtype, want_h, want_a, want_scaled, lora)
    num_pairs = rows.token.numel()
    h_R2I = x.scales.new_empty(num_pairs, width, dtype=dtype) if want_h else None
    a_RI = x.scales.new_empty(num_pairs, inner, dtype=dtype) if want_a else None
    scaled_a, outputs = None, (None, None)
    if want_scaled:
        scaled_a = empty_rows(x, num_pairs, inner)
        outputs = _e4m3x2(scaled_a.codes), scaled_a.scales
    kernel = _compiler("gemm_fp8_up")(hidden, inner, want_h, want_a, want_scaled, activation, _rank(lora))
    _run_on_its_device(
        kernel,
        _e4m3x2(x.codes),
        _e4m3x2(gate_up.codes),
        x.scales,
        block_scales(gate_up),
        *_operands(lora),
        h_R2I,
        a_RI,
        *outputs,
        rows.token,
        *_schedule(rows, x.codes),
    )
    return h_R2I, a_RI, scaled_a


def scaled_down(a, down, rows, dtype, lora=None):
    _, hidden, inner = down.codes.shape
    if not _scaled_fits(a, down, rows, (hidden, inner), dtype):
        return triton.scaled_down(a, down, rows, dtype, lora)
    y_RH = a.scales.new_empty(len(a.codes), hidden, dtype=dtype)
    kernel = _compiler("gemm_fp8_down")(hidden, inner, _rank(lora))
    _run_on_its_device(
        kernel,
        _e4m3x2(a.codes),
        _e4m3x2(down.codes),
        a.scales,
        block_scales(down),
        *_operands(lora),
        y_RH,
        rows.token,
        *_schedule(rows, a.codes),
    )
    return y_RH


def scaled_down_backward(
    dout, down, h_R2I, weight_P, rows, activation, want_dh, want_a, want_dw, want_scaled, lora=None
):
    _, inner, hidden = down.codes.shape
    num_pairs, groups = rows.token.numel(), -(-inner // FP8_BLOCK)
    fits = _scaled_fits(dout, down, rows, (hidden, inner), h_R2I.dtype) and groups * num_pairs < MAX_ELEMENTS
    if not fits or h_R2I.data_ptr() % 16:
        return triton.scaled_down_backward(
            dout, down, h_R2I, weight_P, rows, activation, want_dh, want_a, want_dw, want_scaled, lora
        )
    dh_R2I = torch.empty_like(h_R2I) if want_dh else None
    a_RI = h_R2I.new_empty(num_pairs, inner) if want_a else None
    partials = weight_P.new_empty(groups, num_pairs) if want_dw else None
    scaled_dh, outputs = None, (None, None)
    if want_scaled:
        scaled_dh = empty_rows(dout, num_pairs, 2 * groups * FP8_BLOCK)
        outputs = _e4m3x2(scaled_dh.codes), scaled_dh.scales
    kernel = _compiler("gemm_fp8_down_backward")(
        hidden, inner, want_dh, want_a, want_dw, want_scaled, activation, _rank(lora)
    )
    _run_on_its_device(
        kernel,
        _e4m3x2(dout.codes),
        _e4m3x2(down.codes),
        dout.scales,
        block_scales(down),
        *_operands(lora),
        h_R2I,
        weight_P,
        dh_R2I,
        a_RI,
        *outputs,
        partials,
        rows.pair,
        rows.token,
        *_schedule(rows, dout.codes),
    )
    return dh_R2I, a_RI, triton.routing_gradient(partials, h_R2I, None, rows) if want_dw else None, scaled_dh


def down_backward(
    dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw, lora=None
):
    num_pairs, weight = rows.token.numel(), _describe_weight(down_EHI, dout_TH.dtype, across=True)
    _, inner, hidden = weight.shape
    chosen = tile("gemm_down_backward", inner, weight.kind)
    num_partials = -(-inner // chosen.columns)
    is_taken = _fits(rows, (hidden, inner), dout_TH, h_R2I) and num_partials * num_pairs < MAX_ELEMENTS
    is_taken = is_taken and weight.fits and _lora_fits(lora, weight)
    if not is_taken or (not isinstance(down_EHI, PackedOperand) and _has_small_tiles(rows)):
        down_EHI = _expanded(down_EHI, dout_TH.dtype, rows)
        return triton.down_backward(
            dout_TH, down_EHI, bias_EH, h_R2I, weight_P, rows, activation, interleaved, want_dh, want_a, want_dw, lora
        )
    dh_R2I = torch.empty_like(h_R2I) if want_dh else None
    a_RI = h_R2I.new_empty(num_pairs, inner) if want_a else None
    partials = weight_P.new_empty(num_partials, num_pairs) if want_dw else None
    kernel = _compiler("gemm_down_backward")(
        weight.kind,
        hidden,
        inner,
        weight.depth_contiguous,
        want_dh,
        want_a,
        want_dw,
        activation,
        interleaved,
        _rank(lora),
        chosen,
    )
    _run_on_its_device(
        kernel,
        dout_TH,
        *weight.operands,
        *_operands(lora),
        h_R2I,
        weight_P,
        dh_R2I,
        a_RI,
        partials,
        rows.pair,
        rows.token,
        *_schedule(rows, dout_TH),
    )
    return dh_R2I, a_RI, triton.routing_gradient(partials, dout_TH, bias_EH, rows) if want_dw else None


def _gradient(fallback, gathered_TN, direct_RM, rows, like_EMN):
    """Compute the sum over rows of direct^T gathered[token], in the strides of `like_EMN`."""
    if not _fits(rows, like_EMN.shape[1:], gathered_TN, direct_RM) or not _is_dense(like_EMN):
        return fallback()
    gradient = torch.empty_like(like_EMN)
    num_experts, height, width = gradient.shape
    kernels = _compile_for_tiles(
        _compiler("gemm_wgrad"), gemm_wgrad_tiles(width), gathered_TN.dtype, height, width, gradient.stride(2) == 1
    )
    kernel = kernels[is_short(rows.token.numel(), num_experts)]
    _run_on_its_device(kernel, gathered_TN, direct_RM, gradient, rows.token, rows.offsets, *_schedule(rows, direct_RM))
    return gradient


def gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH):
    return _gradient(lambda: triton.gate_up_gradient(dh_R2I, x_TH, rows, like_E2IH), x_TH, dh_R2I, rows, like_E2IH)


def down_gradient(dout_TH, a_RI, rows, like_EHI):
    return _gradient(
        lambda: triton.down_gradient(dout_TH, a_RI, rows, like_EHI).transpose(1, 2),
        dout_TH,
        a_RI,
        rows,
        like_EHI.transpose(1, 2),
    ).transpose(1, 2)
