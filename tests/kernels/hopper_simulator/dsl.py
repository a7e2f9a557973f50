"""A stand-in for the parts of the CuTe DSL that kernels/hopper uses, over the GPU of machine.py.

Its names are the DSL's, and it does what the DSL's documentation and PTX say, for the layouts that these kernels have.
What only a GPU shows: whether ptxas keeps the order of what is written here, and what reads and writes cost.
"""

from __future__ import annotations

import math
import types
from types import SimpleNamespace

import numpy as np
import torch

from sonicmoe_hf.kernels.minifloat import to_e4m3

from . import threads
from .launches import Fake, Launch, SmemAllocator, Symbol, compile_kernel, struct
from .machine import SimulationError
from .tensors import (
    Accumulator,
    BFloat16,
    Bits,
    Boolean,
    Float8,
    Float16,
    Float32,
    Int32,
    Int64,
    Layout,
    Pointer,
    Registers,
    SwizzledLayout,
    Tensor,
    Uint8,
    Uint32,
    Words,
    bits_of,
    coordinates_of,
    decoded,
    encoded,
    float_of,
    state,
)
from .threads import Atom, TiledMma


def to_kind(value, kind):
    return [*map(kind, value)] if type(value) is list else kind.convert(value)


def bitcast_kind(value, kind):
    return Bits(bits_of(value)) if kind is Int32 else float_of(int(value))


def _make_rmem_tensor(shape, kind):
    thread = state.thread
    if isinstance(shape, tuple) and shape[0] == "accumulator":
        thread.num_accumulators += 1
        if len(thread.warp.accumulators) < thread.num_accumulators:
            lanes = np.full((state.gpu.lanes, shape[1] // 2), np.nan, np.float32)
            thread.warp.accumulators.append(lanes)
        return Accumulator(thread.warp.accumulators[thread.num_accumulators - 1], thread.lane, shape[1])
    return Registers(kind, shape if isinstance(shape, tuple) else (shape,))


def _make_layout(shape, stride=None):
    if isinstance(shape, tuple) and shape[0] == "accumulator":
        return shape
    return Layout(shape, stride)


def _make_tensor(iterator, layout):
    if isinstance(iterator, Accumulator):
        return Accumulator(iterator.of_warp, iterator.lane, layout[1])
    return Tensor(iterator, layout)


def _make_ptr(kind, address, space, assumed_align=1):
    if space == "smem" and address % assumed_align:
        raise SimulationError(f"address {address} is no multiple of {assumed_align}")
    return Pointer(kind, address, space)


def _local_tile(tensor, tile, coordinate):
    """Take the tile at a coordinate; where that is None, a mode of all tiles is left behind the tile's own."""
    moves, own, rest = [], [], []
    for i, (mode, step, extent) in enumerate(tensor.modes):
        at = coordinate[i]
        if i >= len(tile):
            moves.append(at or 0)
            rest += [(mode, step, extent)] if at is None else []
            continue
        moves.append(0 if at is None else at * tile[i])
        own.append((mode, step, tile[i]))
        rest += [(mode, step * tile[i], -(-extent // tile[i]))] if at is None else []
    return tensor.moved(moves, (*own, *rest))


class Box:
    """A tensor whose first two modes are the box of a TMA copy."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape

    def __getitem__(self, index):
        return self.tensor[(None, *index)]


def _tma_partition(atom, coordinate, layout, shared, tensor):
    return tuple(box.tensor if len(box.shape) == 2 else box for box in (shared, tensor))


class TiledCopy:
    """Copy of accumulators to an epi tile of 64 x 64: stmatrix, whose 128 threads write what they hold."""

    def get_slice(self, thread):
        return SimpleNamespace(
            partition_S=lambda tensor: SimpleNamespace(shape=(32, 1, 1, tensor.shape[2])),
            partition_D=lambda tensor: EpiTiles(tensor, thread),
        )

    def retile(self, values):
        return values


class EpiTiles:
    def __init__(self, tensor, thread):
        self.tensor, self.thread = tensor, thread

    def __getitem__(self, index):
        return SimpleNamespace(stage=index[-1], tiles=self)

    def write(self, stage, registers):
        key = "stmatrix", self.tensor.pointer.address, self.thread, stage
        cache = self.tensor.base.cache
        if key not in cache:
            rows, columns = np.array(coordinates_of(self.thread, 64)).T
            addresses = self.tensor.pointer.address + 2 * self.tensor.base.offset(rows, columns, stage)
            cache[key] = state.thread.block.shared.places(addresses, 2)
        state.thread.block.shared.of_width[2][cache[key]] = registers.raw()
        threads.written(cache[key])


def _copy(atom, source, target, tma_bar_ptr=None):
    if isinstance(atom, TiledCopy):
        target.tiles.write(target.stage, source)
    elif atom.kind == "load":
        threads.tma_load(atom, source, target, tma_bar_ptr)
    elif atom.kind == "store":
        threads.tma_store(atom, source, target)
    else:
        raw = source.raw() if isinstance(source, Registers) else source.read_vector()
        if isinstance(target, Registers):
            target.set_raw(raw)
        else:
            threads.written(target.write_vector(raw))


def _size(value, mode=None):
    if mode is not None:
        return math.prod(value.shape[i] for i in mode)
    return value.size if hasattr(value, "size") else len(value)


def _tile_to_shape(atom, shape, order):
    """Lay an atom out over a shape; two fp8 values are one, so the layout is that of 16 bits."""
    k_major, kind = atom
    rows, columns, stages = shape
    return SwizzledLayout(k_major, (rows, columns // 2 if kind is Float8 else columns, stages), order)


def _module(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def _nan_or(function):
    """Make fmin or fmax: of NaN and a number the number, unless `nan` is True."""

    def chosen(a, b, nan=False):
        if a != a or b != b:
            return math.nan if nan else (b if a != a else a)
        return function(a, b)

    return chosen


def _exp2(x):
    return math.inf if x > 1023 else 2.0**x


arch = SimpleNamespace(
    thread_idx=lambda: (state.thread.index, 0, 0),
    warp_idx=lambda: state.thread.warp.index,
    lane_idx=lambda: state.thread.lane,
    block_idx=lambda: (state.thread.block.index, 0, 0),
    grid_dim=lambda: (state.gpu.num_blocks, 1, 1),
    make_warp_uniform=lambda value: value,
    elect_one=threads.elect_one,
    sync_warp=threads.sync_warp,
    sync_threads=threads.named_barrier("sync_threads"),
    barrier=threads.named_barrier("barrier"),
    shuffle_sync=threads.shuffle(lambda lane, source: source),
    shuffle_sync_bfly=threads.shuffle(lambda lane, mask: lane ^ mask),
    mbarrier_init=threads.mbarrier_init,
    mbarrier_init_fence=threads.mbarrier_init_fence,
    mbarrier_wait=threads.mbarrier_wait,
    mbarrier_arrive=threads.mbarrier_arrive,
    mbarrier_arrive_and_expect_tx=lambda pointer, size: threads.barrier_at(pointer).arrive(1, size),
    cp_async_mbarrier_arrive_noinc=threads.arrive_when_copied,
    cp_async_bulk_commit_group=threads.commit_stores,
    cp_async_bulk_wait_group=threads.wait_for_stores,
    fence_proxy=threads.fence_proxy,
    setmaxregister_decrease=threads.set_registers(-1),
    setmaxregister_increase=threads.set_registers(1),
    atomic_add=threads.atomic(lambda before, value: before + value),
    atomic_exch=threads.atomic(lambda before, value: value),
    fmin=_nan_or(min),
    fmax=_nan_or(max),
    exp2=_exp2,
    rcp_approx=lambda x: 1 / x,
)
cpasync = SimpleNamespace(
    make_tiled_tma_atom=threads.make_tma_atom,
    CopyBulkTensorTileG2SOp=lambda: "load",
    CopyBulkTensorTileS2GOp=lambda: "store",
    tma_partition=_tma_partition,
    prefetch_descriptor=lambda atom: None,
)
warpgroup = SimpleNamespace(
    Field=SimpleNamespace(ACCUMULATE="accumulate"),
    fence=threads.fence_wgmma,
    commit_group=threads.commit_wgmma,
    wait_group=threads.wait_for_wgmma,
    make_smem_layout_atom=lambda k_major, kind: (k_major, kind),
)
nvgpu = _module(
    "cutlass.cute.nvgpu",
    OperandMajorMode=SimpleNamespace(K=True, MN=False),
    cpasync=cpasync,
    warpgroup=warpgroup,
    warp=SimpleNamespace(StMatrix8x8x16bOp=lambda transposed, number: None),
    CopyUniversalOp=lambda: "universal",
)
cute = _module(
    "cutlass.cute",
    arch=arch,
    nvgpu=nvgpu,
    jit=lambda function: function,
    struct=struct,
    compile=compile_kernel,
    kernel=lambda function: lambda *arguments: Launch(function, arguments),
    Tensor=object,
    Pointer=object,
    CopyAtom=object,
    TiledMma=object,
    TiledCopy=object,
    ComposedLayout=object,
    AddressSpace=SimpleNamespace(smem="smem", gmem="gmem"),
    math=SimpleNamespace(erf=math.erf),
    make_layout=_make_layout,
    make_tensor=_make_tensor,
    make_ptr=_make_ptr,
    make_rmem_tensor=_make_rmem_tensor,
    make_identity_tensor=lambda shape: SimpleNamespace(shape=shape),
    local_tile=_local_tile,
    copy=_copy,
    gemm=threads.gemm,
    domain_offset=lambda amounts, tensor: tensor.moved(amounts),
    group_modes=lambda tensor, *_: Box(tensor),
    make_copy_atom=lambda op, kind, num_bits_per_copy=None: Atom(op),
    make_tiled_copy_C_atom=lambda atom, mma: mma,
    make_tiled_copy_S=lambda atom, mma: TiledCopy(),
    recast_tensor=lambda tensor, kind: Words(tensor),
    size=_size,
    shape=lambda tensor: tensor.shape,
    cosize=lambda layout: layout.cosize,
    slice_=lambda layout, index: layout,
    select=lambda layout, mode: Layout(*(tuple(part[i] for i in mode) for part in (layout.shape, layout.stride))),
    tile_to_shape=_tile_to_shape,
    recast_ptr=lambda pointer, swizzle, kind: pointer,
    sym_int=Symbol,
    runtime=SimpleNamespace(make_fake_compact_tensor=Fake, make_fake_stream=lambda use_tvm_ffi_env_stream: "stream"),
)
cutlass = _module(
    "cutlass",
    cute=cute,
    Float32=Float32,
    Int32=Int32,
    Int64=Int64,
    Uint8=Uint8,
    Uint32=Uint32,
    BFloat16=BFloat16,
    Float16=Float16,
    Float8E4M3FN=Float8,
    Boolean=Boolean,
    Constexpr=object,
    const_expr=lambda value: value,
    range=lambda *bounds, unroll=None: range(*bounds),
    range_constexpr=range,
    min=min,
    max=max,
    select_=lambda condition, a, b: a if condition else b,
)
MODULES = {
    "cutlass": cutlass,
    "cutlass.cute": cute,
    "cutlass.cute.nvgpu": nvgpu,
    "cutlass.utils.hopper_helpers": _module(
        "hopper_helpers", make_trivial_tiled_mma=TiledMma, get_smem_layout_atom=lambda k_major, kind, extent: k_major
    ),
    "cutlass.memory": _module("memory", SmemAllocator=SmemAllocator),
    "cutlass.tensor_utils": _module("tensor_utils", LayoutEnum=SimpleNamespace(ROW_MAJOR=True, COL_MAJOR=False)),
    "cuda.bindings.driver": _module("driver", CUstream=object),
}


def _permute_bytes(low, high, selector):
    """prmt"""
    source = int(low) & 0xFFFFFFFF | (int(high) & 0xFFFFFFFF) << 32
    word = 0
    for i in (0, 4, 8, 12):
        word |= (source >> 8 * (selector >> i & 7) & 0xFF) << 2 * i
    return Bits(word)


def _pack_e4m3x4(*values):
    """cvt.rn.satfinite.e4m3x2, twice"""
    return Bits(int.from_bytes(bytes(to_e4m3(torch.tensor(values)).tolist()), "little"))


def _dequantize_int4x2(codes, scale):
    """lop3, sub.rn.bf16x2 and mul.rn.bf16x2"""
    codes = np.array([codes], np.int32).view(np.uint16) & 15
    return _word((codes.astype(np.float32) - 8) * _halves(scale))


def _halves(word):
    """Decode the two bf16 values in a word."""
    return decoded(np.array([word], np.int32).view(np.uint16), BFloat16)


def _word(values):
    return Bits(int(encoded(values, BFloat16).view(np.int32)[0]))


def _in_fp32(value):
    return float_of(bits_of(value))


ptx = _module(
    "ptx",
    copy_async=threads.copy_async,
    permute_bytes=_permute_bytes,
    pack_e4m3x4=_pack_e4m3x4,
    pack_bf16x2=lambda *values: _word([_in_fp32(value) for value in values]),
    multiply_add=lambda a, b, c: _in_fp32(_in_fp32(a * b) + c),
    multiply_bf16x2=lambda values, scale: _word(_halves(values) * _halves(scale)),
    dequantize_int4x2=_dequantize_int4x2,
)


def import_module(name, fromlist):
    """Import as `import name` and `from name import ...` do: for `import a.b as c` Python itself walks from a."""
    if fromlist or name in ("cutlass",):
        return MODULES[name]
    root = _module(name.partition(".")[0])
    if root.__name__ == "cutlass":
        root.__dict__.update(
            vars(cutlass), utils=SimpleNamespace(hopper_helpers=MODULES["cutlass.utils.hopper_helpers"])
        )
    else:
        root.bindings = SimpleNamespace(driver=MODULES["cuda.bindings.driver"])
    return root
