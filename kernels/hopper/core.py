"""What the Hopper kernels share: shared-memory layouts, the ring of stages, ragged tensors, the row gather, the stores.

A kernel is one persistent block per SM of three warpgroups: the first produces (and finishes, see finish.py), the
others consume 64 rows of the tile each. Producers fill a ring of (A, B) stages, by TMA where rows lie together and by
asynchronous copies (cp.async) where an index names them; consumers multiply (wgmma, fp32 accumulators).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .work import SLOTS, Work, arrivals

ROWS = 128  # of a tile
HALF = 64  # rows of one consumer warpgroup
DEPTH = 64  # of a stage: 128 bytes of a 16-bit dtype
PIECE = 64  # columns stored at a time
CHUNK = 8  # elements copied by one thread: 16 bytes
BIG = 1 << 30  # more rows than any tensor has
WRAP = 1 << 34  # elements; BIG * WRAP is 2 ** 64, where addresses begin again
THREADS = 384
CONSUMER_WARPS = 8


def major_mode(k_major: bool):
    return OperandMajorMode.K if k_major else OperandMajorMode.MN


def operand_layout(dtype, extent: int, k_major: bool, stages: int):
    """Swizzled shared memory of an operand: (extent, DEPTH, stages)."""
    kind = LayoutEnum.ROW_MAJOR if k_major else LayoutEnum.COL_MAJOR
    atom = warpgroup.make_smem_layout_atom(sm90.get_smem_layout_atom(kind, dtype, DEPTH if k_major else extent), dtype)
    return cute.tile_to_shape(atom, (extent, DEPTH, stages), order=(0, 1, 2) if k_major else (1, 0, 2))


def piece_layout(dtype, buffers: int, across: bool = False):
    """Swizzled shared memory of `buffers` pieces of output: (HALF, PIECE, buffers); `across`: columns are contiguous."""
    kind = LayoutEnum.COL_MAJOR if across else LayoutEnum.ROW_MAJOR
    atom = warpgroup.make_smem_layout_atom(sm90.get_smem_layout_atom(kind, dtype, PIECE), dtype)
    return cute.tile_to_shape(atom, (HALF, PIECE, buffers), order=(1, 0, 2) if across else (0, 1, 2))


def one_stage(layout):
    return cute.slice_(layout, (None, None, 0))


def load_atom(tensor, smem_layout, box):
    """A TMA load of `box` from `tensor` into one stage of `smem_layout`."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem_layout, box)


def store_atom(tensor, smem_layout, box):
    """A TMA store of `box` to `tensor` from one stage of `smem_layout`."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, box)


def ragged(tensor):
    """[rows, columns] as (BIG, columns, BIG) whose first mode ends where we want.

    Element (BIG - left + i, c, end) is row end - left + i of `tensor`; for i >= left it is outside, so that TMA reads
    zero and writes nothing past row `end`. The pointer starts BIG rows early; no address before the tensor is touched.
    """
    columns = tensor.shape[1]
    stride = Int64(tensor.stride[0])
    early = tensor.iterator.toint() - Int64(BIG) * stride * (tensor.element_type.width // 8)
    pointer = cute.make_ptr(tensor.element_type, early, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((Int32(BIG), columns, Int32(BIG)), stride=(stride, 1, stride)))


def ragged_halves(tensor):
    """[rows, 2I] as (BIG, I, 2, BIG): ragged rows of the gate half and of the up half."""
    whole = ragged(tensor)
    rows, columns, ends = whole.shape
    stride = whole.stride[0]
    return cute.make_tensor(
        whole.iterator, cute.make_layout((rows, columns // 2, 2, ends), stride=(stride, 1, columns // 2, stride))
    )


def ragged_pieces(tensor, first, end, *side):
    """The rows first .. first + HALF, up to `end`, of a `ragged` tensor's TMA view (or of one `side` of `ragged_halves`),
    as (HALF, PIECE, number of pieces)."""
    rows = cute.domain_offset((BIG - (end - first), 0), tensor[(None, None, *side, end)])
    return cute.local_tile(rows, (HALF, PIECE), (0, None))


def ragged_columns(tensor):
    """[rows, columns] as (columns, BIG, MOST, MOST), for loads: `ragged` across, with the pointer where it was.

    TMA loads want a mapped pointer, so the BIG rows are taken back by wrapping around the 64-bit address space: element
    (c, BIG - left + i, BIG, end) is row end - left + i.
    """
    most, stride = Int32((1 << 31) - 1), Int64(tensor.stride[0])
    layout = cute.make_layout(
        (tensor.shape[1], Int32(BIG), most, most), stride=(1, stride, Int64(WRAP) - stride, stride)
    )
    return cute.make_tensor(tensor.iterator, layout)


def ragged_columns_rows(tensor, first, end):
    """The rows first .. end of a `ragged_columns` tensor (or its TMA view), as (columns, rows)."""
    return cute.domain_offset((0, BIG - (end - first)), tensor[None, None, BIG, end])


def partition(atom, smem, gmem):
    """(shared [.., stage], global [.., box]) sides of a TMA copy; the first two modes of both are the box."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


@dataclass(frozen=True)
class Ring:
    """The barriers of the stages: full[s] is armed by the producer, empty[s] by the consumers' warps."""

    full: cute.Pointer
    stages: int

    @property
    def empty(self):
        return self.full + self.stages

    @property
    def end(self):
        """Where the ring's barriers end, and those of Work begin."""
        return self.full + 2 * self.stages


def storage(dtype, layout_a, layout_b, layout_pieces, stages: int, own_barriers: int, spare: int = 0):
    """Shared memory: barriers, items passed on, the ring of operands, pieces of output, `spare` elements behind them."""

    @cute.struct
    class Storage:
        barriers_: cute.struct.MemRange[cutlass.Int64, 2 * stages + 2 * SLOTS + own_barriers]
        items: cute.struct.MemRange[Int32, 4 * SLOTS]
        a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_a)], 1024]
        b: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_b)], 1024]
        pieces: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout_pieces) + spare], 1024]

    return Storage


@dataclass(frozen=True)
class Shared:
    """A block's shared memory: operands (extent, DEPTH, stages), pieces (HALF, PIECE, buffers), barriers; its work."""

    a: cute.Tensor
    b: cute.Tensor
    pieces: cute.Tensor
    ring: Ring
    work: Work

    @property
    def own(self):
        """Where the barriers of the kernel's own begin."""
        return self.work.full + 2 * SLOTS


def enter(
    Storage, layout_a, layout_b, layout_pieces, stages: int, producer_arrivals: int, own_arrivals, atoms, counter, items,
    working_warps: int, consumer_warps: int = CONSUMER_WARPS, dealt: bool = False,
) -> Shared:  # fmt: skip
    """Lay out shared memory and initialise barriers, of the ring, of work and then the kernel's own; by every thread.

    counter, items, dealt: see Work. working_warps: how many take part in every item. consumer_warps: how many empty a
    stage.
    """
    memory = SmemAllocator().allocate(Storage)
    a, b, pieces = (
        part.get_tensor(layout.outer, swizzle=layout.inner)
        for part, layout in ((memory.a, layout_a), (memory.b, layout_b), (memory.pieces, layout_pieces))
    )
    ring = Ring(memory.barriers_.data_ptr(), stages)
    work = Work(counter, items, memory.items.get_tensor(cute.make_layout((4, SLOTS))), ring.end, dealt)
    counts = [producer_arrivals] * stages + [consumer_warps] * stages
    counts += [*arrivals(working_warps - 1), *own_arrivals]
    _initialise(ring.full, counts, atoms)
    return Shared(a, b, pieces, ring, work)


@cute.jit
def _initialise(barriers, counts: cutlass.Constexpr, atoms):
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers + i, counts[i])
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The next stage of the ring; the phase flips when it wraps."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@dsl_user_op
def gather_chunk(shared_address, address, size=None, *, loc=None, ip=None):
    """Copy 16 bytes asynchronously, past the L1 cache, from a 64-bit global address to a 32-bit shared one; where `size`
    is 0, write zeros. L2 fetches 256 bytes: the row's next stage will want the other half."""
    operands = [Int32(shared_address).ir_value(loc=loc, ip=ip), Int64(address).ir_value(loc=loc, ip=ip)]
    if size is not None:
        operands.append(Int32(size).ir_value(loc=loc, ip=ip))
    code = "cp.async.cg.shared.global.L2::256B [$0], [$1], 16" + (";" if size is None else ", $2;")
    llvm.inline_asm(
        None, operands, code, "r,l" if size is None else "r,l,r", has_side_effects=True, is_align_stack=False, loc=loc,
        ip=ip,
    )  # fmt: skip


def global_chunk(tensor, offset):
    """The CHUNK elements at an element offset of a tensor: 16 bytes."""
    pointer = cute.make_ptr(
        tensor.element_type, (tensor.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16
    )
    return cute.make_tensor(pointer, cute.make_layout(CHUNK))


def shared_chunk(dtype, first, row, chunk):
    """The chunk-th 16 bytes of a row of 128 bytes in swizzled shared memory whose row 0 is at address `first`.

    The same place as in the swizzled layouts above, at a fraction of the instructions.
    """
    address = first + row * (DEPTH * 2) + ((chunk ^ (row % 8)) * 16)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(CHUNK))


@dataclass(frozen=True)
class PieceStore:
    """Accumulator fragments to shared-memory pieces, and those to global memory by TMA; one per consumer warpgroup.

    A round is: wait, write some of the `buffers` pieces, publish, and one warp sends them.
    """

    copy: cute.TiledCopy
    smem: cute.Tensor
    registers: cute.Tensor
    buffers: int
    group: Int32
    issuer: Boolean

    @property
    def size(self) -> int:
        """Values of a thread in a piece."""
        return cute.size(self.registers)

    def retile(self, accumulator):
        """The accumulator in the order of pieces: entries i * size .. (i + 1) * size belong to columns i * PIECE .."""
        return self.copy.retile(accumulator)

    def buffer(self, piece: int):
        """Where this warpgroup's `piece`-th piece lies among all."""
        return self.group * self.buffers + piece

    def wait(self):
        """Until what was sent before has been read."""
        _wait_for_sent(self.issuer, self.group)

    def write(self, piece: int, values, residual=None):
        """`size` fp32 values, a function of the index, to a piece; what rounding them loses to its `residual`."""
        if residual is not None and residual.truncated:
            residual.pack(self.registers, values)
        else:
            for v in range(self.size):
                self.registers[v] = values(v).to(self.registers.element_type)
        cute.copy(self.copy, self.registers, self.smem[None, None, None, self.buffer(piece)])
        if residual is not None:
            residual.write(self.buffer(piece), values, cute.arch.thread_idx()[0] % 128)

    def publish(self):
        """The written pieces become visible to TMA."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1 + self.group, number_of_threads=128)


@cute.jit
def _wait_for_sent(issuer, group: Int32):
    if issuer:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)


def piece_store(tiled_mma, smem, dtype, thread, group, buffers: int, across: bool = False) -> PieceStore:
    """The store of one consumer warpgroup (`group` 0 or 1); `smem` is all warpgroups' pieces, `thread` 0 .. 127."""
    op = cute.make_copy_atom(warp.StMatrix8x8x16bOp(across, 4), dtype)
    copy = cute.make_tiled_copy_S(op, cute.make_tiled_copy_C_atom(op, tiled_mma))
    thread_copy = copy.get_slice(thread)
    registers = cute.make_rmem_tensor(cute.shape(thread_copy.partition_S(smem))[:3], dtype)
    issuer = cute.arch.make_warp_uniform(thread // 32) == 0
    return PieceStore(copy, thread_copy.partition_D(smem), registers, buffers, group, issuer)
