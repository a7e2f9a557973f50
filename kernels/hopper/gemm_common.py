"""The structure of the Hopper GEMM kernels, and what they share: shared memory, pipelines, the epilogue's stores.

A kernel is persistent: one block (CTA) per SM, with 384 threads in three warpgroups. Warpgroup 0 holds the producer
warps, which fill the stages of the mainloop pipeline: by TMA where rows lie together, by asynchronous copies (cp.async)
where an index names them ("gather"). Warpgroups 1 and 2 are the consumers (wgmma, fp32 accumulators). Classes differ in
how the consumers share the work, and in who runs the epilogue (those with FP8 operands stand in gemm_fp8.py):

    class                       A, B          consumers     epilogue                         registers
    GemmUpKernel                gather, TMA   cooperative   2 epilogue warps, warpgroup 0    136, 184
    GemmDownBackwardKernel      gather, TMA   cooperative   3 epilogue warps, warpgroup 0    136, 184
    CooperativeGemmDownKernel   TMA, TMA      cooperative   3 epilogue warps, warpgroup 0    40, 232
    PingpongGemmDownKernel      TMA, TMA      pingpong      the consumers                    24, 240
    GemmWgradKernel             TMA, gather   cooperative   the consumers                    40, 232

registers: a thread's in warpgroup 0, and in the consumers (pingpong with an adapter: 40, 232). Cooperative: each
consumer computes 64 (GemmWgradKernel: 128) rows of every tile. Pingpong: each computes all rows of every other tile,
and stores them while the other one computes.

    warp role         waits for                                signals (arrive count)
    producer warp 0   empty[s]; scheduler.empty                full[s] (1, and the bytes of TMA); scheduler.full (1)
    gathering warps   empty[s]; scheduler.full                 full[s] (32 a warp, when its cp.asyncs have landed)
    consumer warps    full[s]; scheduler.full; tile_empty[h]   empty[s] (1 a warp); tile_full[h] (1 a warp)
    epilogue warps    scheduler.full; tile_full[h]             tile_empty[h] (1 a warp)

full[s] and empty[s] are the barriers of the `stages` of the mainloop pipeline (CUTLASS's ab_stage). tile_full and
tile_empty are those of the tile in shared memory, where there are epilogue warps (epilogue.py). Pingpong consumers
have an order barrier each (gemm_down.py). Every warp but producer warp 0 also arrives at scheduler.empty
(tile_scheduler.py). While a kernel is compiled, arrivals.py counts these again, and a count that differs is an error.

Adapters (interface.LoraTerm) are more depth: [A | shrunk] [B | factor]^T. After the stages of A and B the producer fills
one more stage for every 64 columns of the rank, all by TMA; gathering warps only arrive there. Of the last of these
stages consumers multiply the k blocks of 16 columns that the rank fills. All else is as in the product without an
adapter.

The last arguments of every kernel say what it computes: tile_table is Rows.tiles, [n + 1, 3] and more rows that are not
used: a row (expert, first row, end) for each of n row tiles. Its row number state_row is (counter of the tile scheduler,
n, unused). num_blocks: how many blocks are launched, one for every SM."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .arrivals import Arrivals
from .config import CONSUMER_WARPS, EPI_TILE_N, TILE_K, VECTOR, WARPGROUP_M
from .tile_scheduler import SCHEDULER_STAGES, TileScheduler, arrive_counts


def major_mode(k_major: bool):
    """Name in CuTe's terms whether an operand is contiguous along the depth."""
    return OperandMajorMode.K if k_major else OperandMajorMode.MN


def operand_layout(dtype, extent: int, k_major: bool, stages: int):
    """Lay out the swizzled shared memory of an operand: (extent, TILE_K, stages)."""
    kind = LayoutEnum.ROW_MAJOR if k_major else LayoutEnum.COL_MAJOR
    atom = warpgroup.make_smem_layout_atom(
        sm90.get_smem_layout_atom(kind, dtype, TILE_K if k_major else extent), dtype
    )
    return cute.tile_to_shape(atom, (extent, TILE_K, stages), order=(0, 1, 2) if k_major else (1, 0, 2))


def epilogue_layout(dtype, stages: int, column_major: bool = False):
    """Lay out the swizzled shared memory of `stages` epi tiles: (WARPGROUP_M, EPI_TILE_N, stages)."""
    kind = LayoutEnum.COL_MAJOR if column_major else LayoutEnum.ROW_MAJOR
    atom = warpgroup.make_smem_layout_atom(sm90.get_smem_layout_atom(kind, dtype, EPI_TILE_N), dtype)
    return cute.tile_to_shape(atom, (WARPGROUP_M, EPI_TILE_N, stages), order=(1, 0, 2) if column_major else (0, 1, 2))


def one_stage(layout):
    """Cut one stage out of a layout of several."""
    return cute.slice_(layout, (None, None, 0))


@dataclass(frozen=True)
class Operands:
    """A and B of a product, and the TMA loads of their stages; atom_a is None where rows of A are gathered, atom_b where
    B is decoded."""

    atom_a: cute.CopyAtom | None
    a: cute.Tensor
    atom_b: cute.CopyAtom | None
    b: cute.Tensor


@dataclass(frozen=True)
class Layouts:
    """Swizzled shared memory: the stages of A and B, and the epi tiles."""

    a: cute.ComposedLayout
    b: cute.ComposedLayout
    epilogue: cute.ComposedLayout


@dataclass(frozen=True)
class TmaStore:
    """A tensor that a kernel stores by TMA."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def tma_load(tensor, smem_layout, box):
    """Make a TMA load of `box` from `tensor` into one stage of `smem_layout`."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem_layout, box)


def tma_store(tensor, smem_layout, box) -> TmaStore:
    """Make a TMA store of `box` to `tensor` from one stage of `smem_layout`."""
    return TmaStore(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, box))


def partition(atom, smem, gmem):
    """Split a TMA copy into its sides, shared memory [.., stage] and global memory [.., box]; `..` is within the box."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


@dataclass(frozen=True)
class MainloopPipeline:
    """The barriers of the mainloop's stages: full[s] is signalled by the producer, empty[s] by the consumers' warps."""

    full: cute.Pointer
    stages: int
    arrivals: Arrivals

    @property
    def empty(self):
        return self.full + self.stages

    @property
    def end(self):
        """Point behind the pipeline's barriers, where those of the tile scheduler begin."""
        return self.full + 2 * self.stages

    def announce(self, stage, tma_bytes):
        """Announce the bytes that TMA will bring; called by the first producer warp."""
        self.arrivals.count("full", 1, "the first producer warp")
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, tma_bytes)

    def arrive_when_copied(self, stage):
        """Arrive when this thread's copies have landed; called by a gathering thread."""
        self.arrivals.count("full", 32 * self.arrivals.warps, "gathering threads")
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full + stage)

    def wait_full(self, stage, phase):
        """Wait until the stage is filled; called by a consumer. Threads write gathered rows through the generic proxy,
        and wgmma reads through the async one: the fence puts these in order (PTX ISA, section Async proxy)."""
        cute.arch.mbarrier_wait(self.full + stage, phase)
        if self.arrivals.counts["full"] > 1:
            cute.arch.fence_proxy("async.shared", space="cta")

    def release(self, stage, times=1, max_times=None):
        """Release the stage, which may be filled again; called by a consumer's warps. times, max_times: see
        Arrivals.arrive."""
        self.arrivals.arrive("empty", self.empty, stage, times, max_times)


def storage(dtype, layouts: Layouts, stages: int, extra_barriers: int, spare: int = 0):
    """Declare shared memory: barriers, shared work tiles, the stages of A and B, epi tiles, and `spare` elements
    behind those."""

    @cute.struct
    class Storage:
        barriers_: cute.struct.MemRange[cutlass.Int64, 2 * stages + 2 * SCHEDULER_STAGES + extra_barriers]
        work_tiles: cute.struct.MemRange[Int32, 4 * SCHEDULER_STAGES]
        a: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.a)], 1024]
        b: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.b)], 1024]
        epilogue: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.epilogue) + spare], 1024]

    return Storage


@dataclass(frozen=True)
class Shared:
    """A block's shared memory: operands (extent, TILE_K, stages), epi tiles (WARPGROUP_M, EPI_TILE_N, epi stages) and
    barriers; its tile scheduler."""

    a: cute.Tensor
    b: cute.Tensor
    epilogue: cute.Tensor
    pipeline: MainloopPipeline
    scheduler: TileScheduler

    @property
    def extra_barriers(self):
        """Point to the first of the barriers that only some kernels have."""
        return self.scheduler.full + 2 * SCHEDULER_STAGES

    @property
    def arrivals(self):
        return self.pipeline.arrivals


def set_up_shared(
    Storage,
    layouts: Layouts,
    stages: int,
    producer_arrivals: int,
    extra_arrivals: dict[str, int],
    atoms,
    counter,
    num_work_tiles,
    working_warps: int,
    consumer_warps: int = CONSUMER_WARPS,
    static: bool = False,
) -> Shared:
    """Lay out shared memory and initialise barriers: of the pipeline, of the scheduler, then the extra ones; by every
    thread.

    counter, num_work_tiles, static: see TileScheduler. working_warps: how many take part in every work tile.
    consumer_warps: how many release a stage. extra_arrivals: the arrive counts of the extra barriers by name, of which
    there are two each, one for each consumer.
    """
    memory = SmemAllocator().allocate(Storage)
    a, b, epilogue = (
        part.get_tensor(layout.outer, swizzle=layout.inner)
        for part, layout in ((memory.a, layouts.a), (memory.b, layouts.b), (memory.epilogue, layouts.epilogue))
    )
    arrivals = Arrivals(
        {"full": producer_arrivals, "empty": consumer_warps, **arrive_counts(working_warps - 1), **extra_arrivals}
    )
    pipeline = MainloopPipeline(memory.barriers_.data_ptr(), stages, arrivals)
    slots = memory.work_tiles.get_tensor(cute.make_layout((4, SCHEDULER_STAGES)))
    scheduler = TileScheduler(counter, num_work_tiles, slots, pipeline.end, static, arrivals)
    each = (stages, stages, SCHEDULER_STAGES, SCHEDULER_STAGES, *(2 for _ in extra_arrivals))
    counts = [count for number, count in zip(each, arrivals.counts.values()) for _ in range(number)]
    _initialise_barriers(pipeline.full, counts, atoms)
    return Shared(a, b, epilogue, pipeline, scheduler)


@cute.jit
def _initialise_barriers(barriers, counts: cutlass.Constexpr, atoms):
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        for atom in atoms:
            if const_expr(atom is not None):
                cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barriers + i, counts[i])
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """Advance to the next stage of the pipeline; the phase flips when the stages begin again."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def look_up_tokens(tokens, token: cute.Tensor, first: Int32, end: Int32, step: cutlass.Constexpr):
    """Look up the tokens of a thread's own rows, every `step`-th from `first`; past the end the last row is repeated."""
    for i in cutlass.range_constexpr(cute.size(tokens)):
        tokens[i] = token[cutlass.max(cutlass.min(first + step * i, end - 1), 0)]


def tiles_and_counter(tile_table, state_row):
    """Split a kernel's `tile_table` into the row tiles [n, 3] and a pointer to the tile scheduler's counter."""
    tiles = cute.make_tensor(tile_table.iterator, cute.make_layout((tile_table[state_row, 1], 3), stride=(3, 1)))
    return tiles, tile_table.iterator + state_row * 3


def global_vector(tensor, offset):
    """View the VECTOR elements at an element offset of a tensor: 16 bytes."""
    pointer = cute.make_ptr(
        tensor.element_type, (tensor.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16
    )
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


def shared_vector(dtype, first, row, vector):
    """View the 16 bytes number `vector` of a row of 128 bytes in swizzled shared memory whose row 0 is at address
    `first`.

    The address is that of the swizzled layouts above, at a fraction of their instructions.
    """
    address = first + row * (TILE_K * 2) + ((vector ^ (row % 8)) * 16)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


@dataclass(frozen=True)
class EpilogueStore:
    """Store of a consumer warpgroup: it writes accumulators to epi tiles in shared memory, and those to global memory by
    TMA.

    A round is: wait, write some of the `stages` epi tiles, publish, and the first warp stores them by TMA.
    """

    copy: cute.TiledCopy
    smem: cute.Tensor
    registers: cute.Tensor
    stages: int
    consumer: Int32
    is_storing_warp: Boolean

    @property
    def size(self) -> int:
        """Count the values of a thread in an epi tile."""
        return cute.size(self.registers)

    def retile(self, accumulator):
        """View the accumulator in the order of epi tiles: values i * size .. (i + 1) * size belong to the i-th."""
        return self.copy.retile(accumulator)

    def stage(self, epi_tile: int):
        """Compute the index of this warpgroup's epi tile among those of all warpgroups."""
        return self.consumer * self.stages + epi_tile

    def wait(self):
        """Wait until TMA has read what was published before."""
        _wait_for_stores(self.is_storing_warp, self.consumer)

    def write(self, epi_tile: int, values, residual=None):
        """Write `size` fp32 values, values(0) .. values(size - 1), to an epi tile, and what rounding them loses to
        `residual`."""
        if residual is not None and residual.truncated:
            residual.pack(self.registers, values)
        else:
            for v in range(self.size):
                self.registers[v] = values(v).to(self.registers.element_type)
        cute.copy(self.copy, self.registers, self.smem[None, None, None, self.stage(epi_tile)])
        if residual is not None:
            residual.write(self.stage(epi_tile), values, cute.arch.thread_idx()[0] % 128)

    def publish(self):
        """Make visible to TMA what was written."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1 + self.consumer, number_of_threads=128)


@cute.jit
def _wait_for_stores(is_storing_warp, consumer: Int32):
    if is_storing_warp:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=128)


def epilogue_store(tiled_mma, smem, dtype, thread, consumer, stages: int, column_major: bool = False) -> EpilogueStore:
    """Make the store of one consumer warpgroup (0 or 1); `smem` is the epi tiles of all, `thread` 0 .. 127."""
    op = cute.make_copy_atom(warp.StMatrix8x8x16bOp(column_major, 4), dtype)
    copy = cute.make_tiled_copy_S(op, cute.make_tiled_copy_C_atom(op, tiled_mma))
    thread_copy = copy.get_slice(thread)
    registers = cute.make_rmem_tensor(cute.shape(thread_copy.partition_S(smem))[:3], dtype)
    is_storing_warp = cute.arch.make_warp_uniform(thread // 32) == 0
    return EpilogueStore(copy, thread_copy.partition_D(smem), registers, stages, consumer, is_storing_warp)
