"""A stand-in for the parts of the CuTe DSL that kernels/hopper uses, over the GPU of machine.py.

Its names are the DSL's, and it does what the DSL's documentation and PTX say, for the layouts that these kernels have. What
only a GPU shows: whether ptxas keeps the order of what is written here, and what reads and writes cost.
"""

from __future__ import annotations

import math
import types
from types import SimpleNamespace

import numpy as np

from . import tensors
from .machine import REGISTERS, SHARED_MEMORY, Barrier, Machine, Memory, SimulationError
from .tensors import (
    Accumulator,
    Bits,
    BFloat16,
    Boolean,
    Float16,
    Float32,
    Int32,
    Int64,
    Layout,
    Pointer,
    Registers,
    SwizzledLayout,
    Tensor,
    Uint32,
    Words,
    bits_of,
    coordinates_of,
    decoded,
    float_of,
    state,
)

SHARED_BASE = 1024


def to_kind(value, kind):
    return [*map(kind, value)] if type(value) is list else kind.convert(value)


def bitcast_kind(value, kind):
    return Bits(bits_of(value)) if kind is Int32 else float_of(int(value))


# ---- threads and barriers


def _thread():
    return state.thread


def _is_first_lane():
    return _thread().lane == 0


def _elect_one():
    """elect.sync, for which all lanes of a warp come together."""
    yield from state.gpu.meet_warp("elect_one")
    return _is_first_lane()


def _barrier(pointer):
    barrier = _thread().block.barriers.get(pointer.address)
    if barrier is None:
        raise SimulationError(f"no barrier was initialised at {pointer.address}")
    return barrier


def _mbarrier_init(pointer, count):
    block = _thread().block
    name = f"{len(block.barriers)} of block {block.index}"
    block.barriers[pointer.address] = Barrier(state.gpu, name, count)


def _sync_warp():
    yield from state.gpu.meet_warp("sync_warp")


def _named_barrier(kind):
    def wait(barrier_id=0, number_of_threads=None):
        number = state.gpu.num_threads if number_of_threads is None else number_of_threads
        yield from state.gpu.meet(("named", barrier_id), kind, number)

    return wait


def _shuffle(source):
    def shuffle(value, lane):
        thread = _thread()
        values = yield from state.gpu.meet_warp("shuffle", value)
        return values[thread.index - thread.lane + source(thread.lane, lane)]

    return shuffle


def _set_registers(count):
    if _is_first_lane():
        _thread().block.registers += count - REGISTERS // 3


def _atomic(change):
    def update(pointer, value, sem=None, scope=None):
        tensor = Tensor(pointer, Layout((1,)))
        before = tensor[0]
        tensor[0] = change(before, value)
        return before

    return update


# ---- asynchronous copies


def _copy_async(shared_address, address, size=None):
    if shared_address % 16 or address % 16:
        raise SimulationError("cp.async off alignment")
    if size not in (None, 0, 16):
        raise SimulationError(f"cp.async of {size} bytes")
    _thread().copies.append((shared_address, address, 16 if size is None else size))


def _arrive_when_copied(pointer):
    """cp.async.mbarrier.arrive.noinc"""
    thread, barrier = _thread(), _barrier(pointer)
    thread.landing.append((thread.copies, barrier))
    thread.copies = []

    def land():
        copies, barrier = thread.landing.popleft()  # of one thread, in order
        shared, memory = thread.block.shared, state.gpu.memory
        if copies:
            to, source, sizes = np.array(copies, np.int64).T
            vector = 2 * np.arange(8)
            values = np.zeros((len(to), 8), np.uint16)
            read = memory.places((source[:, None] + vector)[sizes > 0], 2)
            values[sizes > 0] = memory.of_width[2][read]
            shared.of_width[2][shared.places(to[:, None] + vector, 2)] = values
        barrier.arrive()

    state.gpu.some_time(land)


class Atom:
    """How `copy` copies; of TMA with the box that the descriptor was made for."""

    def __init__(self, kind, box=None):
        self.kind, self.box = kind, box


def _make_tma_atom(op, tensor, smem_layout, box):
    if tuple(smem_layout.shape[:2]) != tuple(box):
        raise SimulationError(f"a box of {box} to shared memory of {smem_layout.shape}")
    return Atom(op, box), Tensor(tensor.pointer, tensor.base, tensor.origin, tensor.modes, clipped=True)


def _check_boxes(atom, *sides):
    if any(side.shape != tuple(atom.box) for side in sides):
        raise SimulationError(f"TMA of {[side.shape for side in sides]} by boxes of {atom.box}")


def _tma_load(atom, source, target, tma_bar_ptr):
    if not _is_first_lane():
        return
    _check_boxes(atom, source, target)
    block, barrier = _thread().block, _barrier(tma_bar_ptr)
    places, memory, gpu = target.shared_places(), state.gpu.memory, state.gpu

    def land():
        addresses, inside = source.box()
        values = np.zeros(addresses.shape, np.uint16)
        values[inside] = memory.of_width[2][memory.places(addresses[inside], 2)]
        block.shared.of_width[2][places] = values
        barrier.land(2 * places.size)

    gpu.some_time(land)


def _tma_store(atom, source, target):
    if not _is_first_lane():
        return
    _check_boxes(atom, source, target)
    thread, places = _thread(), source.shared_places()
    if thread.block.unfenced[places].any():
        raise SimulationError(f"{thread}: TMA might not see what was written to shared memory: no fence_proxy")
    thread.stores.append((places, thread.block.shared.of_width[2][places], target))


def _commit_stores():
    thread = _thread()
    if thread.stores:
        thread.store_groups.append(thread.stores)
        thread.stores = []


def _wait_for_stores(groups, read=False):
    thread, memory = _thread(), state.gpu.memory
    while len(thread.store_groups) > groups:
        for places, values, target in thread.store_groups.pop(0):
            if not np.array_equal(thread.block.shared.of_width[2][places], values):
                raise SimulationError(f"{thread}: shared memory was written while TMA read it")
            addresses, inside = target.box()
            memory.of_width[2][memory.places(addresses[inside], 2)] = values[inside]


def _written(places):
    thread = _thread()
    thread.block.unfenced[places] = True
    thread.unfenced.append(places)


def _fence_proxy(kind, space=None):
    thread = _thread()
    for places in thread.unfenced:
        thread.block.unfenced[places] = False
    thread.unfenced.clear()


# ---- wgmma


class Fragment:
    """An operand in shared memory: (extent, 16, k block, stage)."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tensor.shape[0], 1, tensor.shape[1] // 16, tensor.shape[2]

    def __getitem__(self, index):
        *_, k_block, stage = index
        rows, (mode, step, _), _ = self.tensor.modes
        if not 0 <= k_block < self.shape[2]:
            raise SimulationError(f"k block {k_block} of {self.shape[2]}")
        return self.tensor.moved((0, 16 * k_block, stage), (rows, (mode, step, 16)))


class TiledMma:
    """wgmma of 64 x columns x 16."""

    def __init__(self, kind, other, major_a, major_b, accumulator, atoms, tiler_mn):
        self.kind, (_, self.columns) = kind, tiler_mn
        self.k_major = {"a": major_a, "b": major_b}

    def set(self, field, value):
        _thread().accumulates[self] = value

    def get_slice(self, thread):
        return SimpleNamespace(
            partition_A=lambda tensor: tensor,
            partition_B=lambda tensor: tensor,
            partition_C=lambda tensor: coordinates_of(thread, tensor.shape[1]),
        )

    def _fragment(self, operand, extent, tensor):
        if tensor.shape[0] != extent or tensor.base.k_major != self.k_major[operand]:
            raise SimulationError(f"wgmma of {extent} with operand {operand} of {tensor.shape}")
        return Fragment(tensor)

    def make_fragment_A(self, tensor):
        return self._fragment("a", 64, tensor)

    def make_fragment_B(self, tensor):
        return self._fragment("b", self.columns, tensor)

    def partition_shape_C(self, shape):
        return "accumulator", shape[1]


def _gemm(mma, out, a, b, accumulator):
    """Lane 0 issues for its warp, which computes 16 of the 64 rows."""
    thread = _thread()
    if thread.lane:
        return
    if not thread.warp.fenced:
        raise SimulationError(f"{thread}: wgmma without a fence")
    if out.columns != mma.columns:
        raise SimulationError(f"wgmma of {mma.columns} columns into {out.columns}")
    rows = a.shared_places()[16 * (thread.warp.index % 4) :][:16]
    operands = [(places, thread.block.shared.of_width[2][places]) for places in (rows, b.shared_places())]
    thread.warp.issued.append((out, operands, thread.accumulates[mma], mma.kind))


def _fence_wgmma():
    if _is_first_lane():
        _thread().warp.fenced = True


def _commit_wgmma():
    if _is_first_lane():
        warp = _thread().warp
        warp.groups.append(warp.issued)
        warp.issued, warp.fenced = [], False


def _wait_for_wgmma(left):
    warp = _thread().warp
    shared = warp.block.shared.of_width[2]

    def finish():
        while len(warp.groups) > left:
            for out, operands, accumulate, kind in warp.groups.pop(0):
                if not all(np.array_equal(shared[places], values) for places, values in operands):
                    raise SimulationError(f"warp {warp.index}: an operand was written during its wgmma")
                a, b = (decoded(values, kind).astype(np.float32) for _, values in operands)
                with np.errstate(all="ignore"):
                    product = (a @ b.T).reshape(2, 8, -1, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, -1)
                    own = out.of_warp[:, : out.size]
                    own[:] = own + product if accumulate else product

    yield from state.gpu.meet_warp("wgmma wait", action=finish)


# ---- tensors


def _make_rmem_tensor(shape, kind):
    thread = _thread()
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
    """The tile at a coordinate; where that is None, a mode of all tiles is left behind the tile's own."""
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
    """Of accumulators to an epi tile of 64 x 64: stmatrix, whose 128 threads write what they hold."""

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
            cache[key] = _thread().block.shared.places(addresses, 2)
        _thread().block.shared.of_width[2][cache[key]] = registers.raw()
        _written(cache[key])


def _copy(atom, source, target, tma_bar_ptr=None):
    if isinstance(atom, TiledCopy):
        target.tiles.write(target.stage, source)
    elif atom.kind == "load":
        _tma_load(atom, source, target, tma_bar_ptr)
    elif atom.kind == "store":
        _tma_store(atom, source, target)
    else:
        raw = source.raw() if isinstance(source, Registers) else source.read_vector()
        if isinstance(target, Registers):
            target.set_raw(raw)
        else:
            target.write_vector(raw)


def _size(value, mode=None):
    if mode is not None:
        return math.prod(value.shape[i] for i in mode)
    return value.size if hasattr(value, "size") else len(value)


# ---- shared memory


class Range:
    def __init__(self, kind, count, align=8):
        self.kind, self.count, self.align = kind, count, align

    def __class_getitem__(cls, parameters):
        return cls(*parameters)


class Align:
    def __class_getitem__(cls, parameters):
        part, align = parameters
        return Range(part.kind, part.count, align)


class Part:
    def __init__(self, kind, address):
        self.kind, self.address = kind, address

    def data_ptr(self):
        return Pointer(self.kind, self.address, "smem")

    def get_tensor(self, layout, swizzle=None):
        return Tensor(self.data_ptr(), layout)


def _struct(cls):
    return list(cls.__annotations__.items())


_struct.MemRange, _struct.Align = Range, Align


class SmemAllocator:
    def allocate(self, parts):
        block = _thread().block
        address, places = SHARED_BASE, {}
        for name, part in parts:
            address = -(-address // part.align) * part.align
            places[name] = Part(part.kind, address)
            address += part.count * part.kind.bytes
        if address - SHARED_BASE > SHARED_MEMORY:
            raise SimulationError(f"{address - SHARED_BASE} bytes of shared memory")
        if block.shared is None:
            block.shared = Memory(SHARED_MEMORY + SHARED_BASE, SHARED_BASE)
            block.shared.allocate(address - SHARED_BASE, 16)
            block.unfenced = np.zeros(len(block.shared.bytes) // 2, bool)
        return SimpleNamespace(**places)


# ---- launches


class Launch:
    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def launch(self, grid, block, stream, min_blocks_per_mp):
        state.gpu.run(lambda: self.function(*self.arguments), grid[0], block[0])


class Fake:
    """What a compiled kernel accepts as an argument."""

    def __init__(self, kind, shape, stride_order, assumed_align):
        self.kind, self.shape, self.order, self.align = kind, shape, stride_order, assumed_align

    def permuted(self, tensor):
        """With the contiguous dimension last."""
        return tensor.permute(sorted(range(tensor.ndim), key=lambda i: -self.order[i]))

    def check(self, tensor, sizes):
        for size, wanted in zip(tensor.shape, self.shape):
            if isinstance(wanted, Symbol):
                wanted = sizes.setdefault(wanted, size)
            if size != wanted:
                raise SimulationError(f"a tensor of {tuple(tensor.shape)} for one of {self.shape}")
        name = {BFloat16: "bfloat16", Float16: "float16", Float32: "float32", Int32: "int32"}[self.kind]
        if str(tensor.dtype) != f"torch.{name}" or tensor.ndim != len(self.shape):
            raise SimulationError(f"{tensor.dtype} of {tuple(tensor.shape)} for {self.kind} of {self.shape}")
        if tensor.data_ptr() % self.align or not self.permuted(tensor).is_contiguous():
            raise SimulationError(f"strides {tensor.stride()} or alignment of an argument of {tuple(tensor.shape)}")


class Symbol:
    """A size that is known when the kernel is launched."""


class Copied:
    """A tensor of the host's that is copied to the GPU and back."""

    def __init__(self, fake, tensor):
        import torch

        self.host = fake.permuted(tensor).view(torch.int16 if fake.kind.width == 16 else torch.int32).numpy()
        self.memory = state.gpu.memory
        size = self.host.size * fake.kind.bytes
        self.places = slice(0, 0)
        address = self.memory.allocate(size)
        start = (address - self.memory.base) // fake.kind.bytes
        self.width, self.places = fake.kind.bytes, slice(start, start + self.host.size)
        self.memory.of_width[self.width][self.places] = self.host.reshape(-1).view(f"u{self.width}")
        self.tensor = Tensor(Pointer(fake.kind, address, "gmem"), Layout(tensor.shape, tensor.stride()))

    def copy_back(self):
        values = self.memory.of_width[self.width][self.places].reshape(self.host.shape)
        self.host[...] = values.view(self.host.dtype)


seeds = iter(range(1 << 30))


def _compile(kernel, *fakes, options):
    *fakes, _ = fakes  # the stream is not passed

    def launch(*arguments):
        state.gpu, sizes, copied, passed = Machine(next(seeds)), {}, [], []
        if len(arguments) != len(fakes):
            raise SimulationError(f"{len(arguments)} arguments for {len(fakes)}")
        for fake, argument in zip(fakes, arguments):
            if isinstance(fake, Fake) and argument is not None:
                fake.check(argument, sizes)
                copied.append(Copied(fake, argument))
                argument = copied[-1].tensor
            elif type(fake) is not type(argument):
                raise SimulationError(f"{argument!r} for {fake!r}")
            passed.append(argument)
        kernel(*passed, None)
        for each in copied:
            each.copy_back()

    return launch


# ---- the modules


def _module(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def _nan_or(function):
    def chosen(a, b, nan=False):
        return math.nan if nan and (a != a or b != b) else function(a, b)

    return chosen


def _exp2(x):
    return math.inf if x > 1023 else 2.0**x


arch = SimpleNamespace(
    thread_idx=lambda: (_thread().index, 0, 0), warp_idx=lambda: _thread().warp.index,
    lane_idx=lambda: _thread().lane, block_idx=lambda: (_thread().block.index, 0, 0),
    grid_dim=lambda: (state.gpu.num_blocks, 1, 1), make_warp_uniform=lambda value: value, elect_one=_elect_one,
    sync_warp=_sync_warp, sync_threads=_named_barrier("sync_threads"), barrier=_named_barrier("barrier"),
    shuffle_sync=_shuffle(lambda lane, source: source), shuffle_sync_bfly=_shuffle(lambda lane, mask: lane ^ mask),
    mbarrier_init=_mbarrier_init, mbarrier_init_fence=lambda: None,
    mbarrier_wait=lambda pointer, parity: state.gpu.wait(_barrier(pointer), int(parity)),
    mbarrier_arrive=lambda pointer, arrive_count=1: _barrier(pointer).arrive(arrive_count),
    mbarrier_arrive_and_expect_tx=lambda pointer, size: _barrier(pointer).arrive(1, size),
    cp_async_mbarrier_arrive_noinc=_arrive_when_copied, cp_async_bulk_commit_group=_commit_stores,
    cp_async_bulk_wait_group=_wait_for_stores, fence_proxy=_fence_proxy,
    setmaxregister_decrease=_set_registers, setmaxregister_increase=_set_registers,
    atomic_add=_atomic(lambda before, value: before + value), atomic_exch=_atomic(lambda before, value: value),
    fmin=_nan_or(min), fmax=_nan_or(max), exp2=_exp2, rcp_approx=lambda x: 1 / x,
)  # fmt: skip
cpasync = SimpleNamespace(
    make_tiled_tma_atom=_make_tma_atom, CopyBulkTensorTileG2SOp=lambda: "load",
    CopyBulkTensorTileS2GOp=lambda: "store", tma_partition=_tma_partition, prefetch_descriptor=lambda atom: None,
)  # fmt: skip
warpgroup = SimpleNamespace(
    Field=SimpleNamespace(ACCUMULATE="accumulate"), fence=_fence_wgmma, commit_group=_commit_wgmma,
    wait_group=_wait_for_wgmma, make_smem_layout_atom=lambda atom, kind: atom,
)  # fmt: skip
nvgpu = _module(
    "cutlass.cute.nvgpu", OperandMajorMode=SimpleNamespace(K=True, MN=False), cpasync=cpasync, warpgroup=warpgroup,
    warp=SimpleNamespace(StMatrix8x8x16bOp=lambda transposed, number: None), CopyUniversalOp=lambda: "universal",
)  # fmt: skip
cute = _module(
    "cutlass.cute", arch=arch, nvgpu=nvgpu, jit=lambda function: function, struct=_struct, compile=_compile,
    kernel=lambda function: lambda *arguments: Launch(function, arguments),
    Tensor=object, Pointer=object, CopyAtom=object, TiledMma=object, TiledCopy=object, ComposedLayout=object,
    AddressSpace=SimpleNamespace(smem="smem", gmem="gmem"), math=SimpleNamespace(erf=math.erf),
    make_layout=_make_layout, make_tensor=_make_tensor, make_ptr=_make_ptr, make_rmem_tensor=_make_rmem_tensor,
    make_identity_tensor=lambda shape: SimpleNamespace(shape=shape), local_tile=_local_tile, copy=_copy, gemm=_gemm,
    domain_offset=lambda amounts, tensor: tensor.moved(amounts), group_modes=lambda tensor, *_: Box(tensor),
    make_copy_atom=lambda op, kind, num_bits_per_copy=None: Atom(op),
    make_tiled_copy_C_atom=lambda atom, mma: mma, make_tiled_copy_S=lambda atom, mma: TiledCopy(),
    recast_tensor=lambda tensor, kind: Words(tensor), size=_size, shape=lambda tensor: tensor.shape,
    cosize=lambda layout: layout.cosize, slice_=lambda layout, index: layout,
    select=lambda layout, mode: Layout(*(tuple(part[i] for i in mode) for part in (layout.shape, layout.stride))),
    tile_to_shape=lambda k_major, shape, order: SwizzledLayout(k_major, shape, order), sym_int=Symbol,
    runtime=SimpleNamespace(
        make_fake_compact_tensor=Fake, make_fake_stream=lambda use_tvm_ffi_env_stream: "stream"
    ),
)  # fmt: skip
cutlass = _module(
    "cutlass", cute=cute, Float32=Float32, Int32=Int32, Int64=Int64, Uint32=Uint32, BFloat16=BFloat16,
    Float16=Float16, Boolean=Boolean, Constexpr=object, const_expr=lambda value: value,
    range=lambda *bounds, unroll=None: range(*bounds), range_constexpr=range, min=min, max=max,
    select_=lambda condition, a, b: a if condition else b,
)  # fmt: skip
MODULES = {
    "cutlass": cutlass, "cutlass.cute": cute, "cutlass.cute.nvgpu": nvgpu,
    "cutlass.utils.hopper_helpers": _module(
        "hopper_helpers", make_trivial_tiled_mma=TiledMma, get_smem_layout_atom=lambda k_major, kind, extent: k_major
    ),
    "cutlass.memory": _module("memory", SmemAllocator=SmemAllocator),
    "cutlass.tensor_utils": _module("tensor_utils", LayoutEnum=SimpleNamespace(ROW_MAJOR=True, COL_MAJOR=False)),
    "cuda.bindings.driver": _module("driver", CUstream=object),
}  # fmt: skip


def _permute_bytes(low, high, selector):
    """prmt"""
    source = int(low) & 0xFFFFFFFF | (int(high) & 0xFFFFFFFF) << 32
    word = 0
    for i in (0, 4, 8, 12):
        word |= (source >> 8 * (selector >> i & 7) & 0xFF) << 2 * i
    return Bits(word)


ptx = _module("ptx", copy_async=_copy_async, permute_bytes=_permute_bytes)


def import_module(name, fromlist):
    """What `import name` and `from name import ...` give: for `import a.b as c` Python itself walks from a."""
    if fromlist or name in ("cutlass",):
        return MODULES[name]
    root = _module(name.partition(".")[0])
    if root.__name__ == "cutlass":
        root.__dict__.update(vars(cutlass), utils=SimpleNamespace(hopper_helpers=MODULES["cutlass.utils.hopper_helpers"]))
    else:
        root.bindings = SimpleNamespace(driver=MODULES["cuda.bindings.driver"])
    return root


__all__ = ["bitcast_kind", "import_module", "ptx", "tensors", "to_kind"]
