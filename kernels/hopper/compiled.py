"""Compiled kernels, by static parameters: sizes H and I, dtype, layout, options. T, E and the number of rows are dynamic.

weights: the dtype of all tensors; or the PackedKind of a weight that is decoded where the tile is loaded (decode.py).
Such a weight is stored as [E, 2I, H] or [E, H, I] in any case, and the other tensors are bf16.

The arguments that kernels are compiled for are fake tensors: nothing here needs a GPU.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from .cache import cached
from .config import MAX_PINGPONG_COLUMNS, PackedKind, Tile
from .decode import DecodedGemmDownBackwardKernel, DecodedGemmDownKernel, DecodedGemmUpKernel
from .gemm_down import CooperativeGemmDownKernel, PingpongGemmDownKernel
from .gemm_down_backward import GemmDownBackwardKernel
from .gemm_fp8 import BF16, GROUP, GemmFp8DownKernel, GemmFp8UpKernel
from .gemm_fp8_backward import GemmFp8DownBackwardKernel
from .gemm_up import GemmUpKernel
from .gemm_wgrad import GemmWgradKernel

DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
SCALE_DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "uint8": cutlass.Uint8,
}
OPTIONS = "--enable-tvm-ffi --gpu-arch sm_90a"  # for Hopper, also where this machine has another GPU or none


def _tensor(dtype, shape, order=None, align=16):
    order = tuple(reversed(range(len(shape)))) if order is None else order
    return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def _indices(length, width=None):
    return _tensor(cutlass.Int32, (length,) if width is None else (length, width), align=4)


def _cutlass_dtype(weights):
    return cutlass.BFloat16 if isinstance(weights, PackedKind) else DTYPES[weights]


def _weights(weights, rows, depth, depth_contiguous):
    """Make the operands of a weight [E, rows, depth]: itself, or for a packed one its words of codes, scales and
    state."""
    if not isinstance(weights, PackedKind):
        return (_weight(DTYPES[weights], rows, depth, depth_contiguous),)
    rows, depth = (rows, depth) if depth_contiguous else (depth, rows)
    words = cute.sym_int(), rows, depth // 8
    scales, scale_dtype = (cute.sym_int(), rows, depth // weights.group), SCALE_DTYPES[weights.scales]
    state = None
    if weights.format == "uint4":
        state = _tensor(cutlass.Uint8, scales, align=1)
    elif weights.format == "nf4":
        state = _tensor(cutlass.Float32, (cute.sym_int(),), align=4)
    return _tensor(cutlass.Int32, words), _tensor(scale_dtype, scales, align=scale_dtype.width // 8), state


def _weight(dtype, rows, depth, depth_contiguous):
    return _tensor(dtype, (cute.sym_int(), rows, depth), (2, 1, 0) if depth_contiguous else (2, 0, 1))


def _lora(dtype, pairs, rows_of_weight, rank, depth_contiguous):
    """Make shrunk rows and the factor of an adapter of this rank, which is 0 without one."""
    if not rank:
        return None, None
    return _tensor(dtype, (pairs, rank)), _weight(dtype, rows_of_weight, rank, depth_contiguous)


def _scheduling():
    """Make the last arguments of every kernel: tile_table, state_row, num_blocks (gemm_common.py)."""
    return _indices(cute.sym_int(), 3), Int32(1), Int32(1)


def _stream():
    return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


@cached
def gemm_down(weights, rows_of_weight: int, depth: int, depth_contiguous: bool, bias: bool, rank: int, tile: Tile):
    """Compile PingpongGemmDownKernel, or for wider tiles CooperativeGemmDownKernel: source [R, depth], weight [E,
    rows_of_weight, depth]."""
    dtype, pairs = _cutlass_dtype(weights), cute.sym_int()
    if isinstance(weights, PackedKind):
        kernel = DecodedGemmDownKernel(weights, tile, not depth_contiguous)
    else:
        kernel = (CooperativeGemmDownKernel if tile.columns > MAX_PINGPONG_COLUMNS else PingpongGemmDownKernel)(
            dtype, tile
        )
    return cute.compile(
        kernel,
        _tensor(dtype, (pairs, depth)),
        *_weights(weights, rows_of_weight, depth, depth_contiguous),
        _tensor(dtype, (cute.sym_int(), rows_of_weight), align=2) if bias else None,
        *_lora(dtype, pairs, rows_of_weight, rank, depth_contiguous),
        _tensor(dtype, (pairs, rows_of_weight)),
        _indices(pairs),
        *_scheduling(),
        _stream(),
        options=OPTIONS,
    )


@cached
def gemm_up(
    weights,
    hidden: int,
    inner: int,
    hidden_contiguous: bool,
    bias: bool,
    want_h: bool,
    want_a: bool,
    activation,
    interleaved: bool,
    rank: int,
    tile: Tile,
):
    """Compile GemmUpKernel: x [T, hidden], gate_up [E, 2 inner, hidden], or without a gate [E, inner, hidden]."""
    dtype, pairs, width = _cutlass_dtype(weights), cute.sym_int(), activation.width(inner)
    if isinstance(weights, PackedKind):
        kernel = DecodedGemmUpKernel(weights, tile, activation, interleaved)
    else:
        kernel = GemmUpKernel(dtype, tile, activation, interleaved)
    return cute.compile(
        kernel,
        _tensor(dtype, (cute.sym_int(), hidden)),
        *_weights(weights, width, hidden, hidden_contiguous),
        _tensor(dtype, (cute.sym_int(), width), align=2) if bias else None,
        *_lora(dtype, pairs, width, rank, hidden_contiguous),
        _tensor(dtype, (pairs, width)) if want_h else None,
        _tensor(dtype, (pairs, inner)) if want_a else None,
        _indices(pairs),
        *_scheduling(),
        _stream(),
        options=OPTIONS,
    )


@cached
def gemm_down_backward(
    weights,
    hidden: int,
    inner: int,
    hidden_contiguous: bool,
    want_dh: bool,
    want_a: bool,
    want_dw: bool,
    activation,
    interleaved: bool,
    rank: int,
    tile: Tile,
):
    """Compile GemmDownBackwardKernel: dout [T, hidden], weight [E, inner, hidden], h [R, 2 inner], [R, inner] without
    a gate."""
    dtype, pairs, width = _cutlass_dtype(weights), cute.sym_int(), activation.width(inner)
    if isinstance(weights, PackedKind):
        kernel = DecodedGemmDownBackwardKernel(weights, tile, activation, interleaved)
    else:
        kernel = GemmDownBackwardKernel(dtype, tile, activation, interleaved)
    return cute.compile(
        kernel,
        _tensor(dtype, (cute.sym_int(), hidden)),
        *_weights(weights, inner, hidden, hidden_contiguous),
        *_lora(dtype, pairs, inner, rank, hidden_contiguous),
        _tensor(dtype, (pairs, width)),
        _tensor(cutlass.Float32, (pairs,), align=4),
        _tensor(dtype, (pairs, width)) if want_dh else None,
        _tensor(dtype, (pairs, inner)) if want_a else None,
        _tensor(cutlass.Float32, (cute.sym_int(), pairs), align=4) if want_dw else None,
        _indices(pairs),
        _indices(pairs),
        *_scheduling(),
        _stream(),
        options=OPTIONS,
    )


@cached
def gemm_wgrad(weights, height: int, width: int, width_contiguous: bool, tile: Tile):
    """Compile GemmWgradKernel: gathered [T, width], direct [R, height] -> [E, height, width]."""
    dtype, pairs = DTYPES[weights], cute.sym_int()
    return cute.compile(
        GemmWgradKernel(dtype, tile),
        _tensor(dtype, (cute.sym_int(), width)),
        _tensor(dtype, (pairs, height)),
        _weight(dtype, height, width, width_contiguous),
        _indices(pairs),
        _indices(cute.sym_int()),
        *_scheduling(),
        _stream(),
        options=OPTIONS,
    )


def _scales(*shape):
    return _tensor(cutlass.Float32, shape, align=4)


@cached
def gemm_fp8_up(hidden: int, inner: int, want_h: bool, want_a: bool, want_scaled: bool, activation, rank: int):
    """Compile GemmFp8UpKernel: x [T, hidden], gate_up [E, 2 inner, hidden], both in e4m3x2. want_scaled: a in e4m3;
    want_a: in bf16 beside that."""
    pairs, groups, inner_groups = cute.sym_int(), -(-hidden // GROUP), -(-inner // GROUP)
    return cute.compile(
        GemmFp8UpKernel(activation),
        _tensor(BF16, (cute.sym_int(), hidden // 2)),
        _tensor(BF16, (cute.sym_int(), 2 * inner, hidden // 2)),
        _scales(cute.sym_int(), groups),
        _scales(cute.sym_int(), 2 * inner_groups, groups),
        *_lora(BF16, pairs, 2 * inner, rank, True),
        _tensor(BF16, (pairs, 2 * inner)) if want_h else None,
        _tensor(BF16, (pairs, inner)) if want_a else None,
        _tensor(BF16, (pairs, inner // 2)) if want_scaled else None,
        _scales(pairs, inner_groups) if want_scaled else None,
        _indices(pairs),
        *_scheduling(),
        _stream(),
        options=OPTIONS,
    )


@cached
def gemm_fp8_down(hidden: int, inner: int, rank: int):
    """Compile GemmFp8DownKernel: a [R, inner], down [E, hidden, inner], both in e4m3x2."""
    pairs, groups = cute.sym_int(), -(-inner // GROUP)
    return cute.compile(
        GemmFp8DownKernel(),
        _tensor(BF16, (pairs, inner // 2)),
        _tensor(BF16, (cute.sym_int(), hidden, inner // 2)),
        _scales(pairs, groups),
        _scales(cute.sym_int(), -(-hidden // GROUP), groups),
        *_lora(BF16, pairs, hidden, rank, True),
        _tensor(BF16, (pairs, hidden)),
        _indices(pairs),
        *_scheduling(),
        _stream(),
        options=OPTIONS,
    )


@cached
def gemm_fp8_down_backward(
    hidden: int, inner: int, want_dh: bool, want_a: bool, want_dw: bool, want_scaled: bool, activation, rank: int
):
    """Compile GemmFp8DownBackwardKernel: dout [T, hidden], weight [E, inner, hidden], both in e4m3x2; h [R, 2
    inner]."""
    pairs, groups, inner_groups = cute.sym_int(), -(-hidden // GROUP), -(-inner // GROUP)
    return cute.compile(
        GemmFp8DownBackwardKernel(activation, hidden),
        _tensor(BF16, (cute.sym_int(), hidden // 2)),
        _tensor(BF16, (cute.sym_int(), inner, hidden // 2)),
        _scales(cute.sym_int(), groups),
        _scales(cute.sym_int(), inner_groups, groups),
        *_lora(BF16, pairs, inner, rank, True),
        _tensor(BF16, (pairs, 2 * inner)),
        _scales(pairs),
        _tensor(BF16, (pairs, 2 * inner)) if want_dh else None,
        _tensor(BF16, (pairs, inner)) if want_a else None,
        _tensor(BF16, (pairs, inner_groups * GROUP)) if want_scaled else None,
        _scales(pairs, 2 * inner_groups) if want_scaled else None,
        _scales(inner_groups, pairs) if want_dw else None,
        _indices(pairs),
        _indices(pairs),
        *_scheduling(),
        _stream(),
        options=OPTIONS,
    )


def compile_share(share) -> None:
    """Compile kernels, in a process that `cache.compile_ahead` began."""
    for name, parameters in share:
        globals()[name](*parameters)
