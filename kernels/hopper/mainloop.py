"""A consumer's mainloop: wgmma over the stages of the pipeline into fp32 accumulators.

A stage has TILE_K = 64 columns of both operands: four k blocks of 16. The wgmmas of a stage are one group, and a stage is
released when the group after it has been issued, so that the tensor cores always have work.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .config import EPI_TILE_N, TILE_K, WARPGROUP_M
from .gemm_common import MainloopPipeline, Shared, advance, major_mode


@dataclass(frozen=True)
class Mma:
    """The MMAs of a consumer: for a whole tile, and for the last tile of the columns where that is narrower, or None."""

    whole: cute.TiledMma
    narrow: cute.TiledMma | None


@dataclass(frozen=True)
class Narrow:
    """The last tile of the columns where it is narrower: its MMA, its B and how many columns it has."""

    mma: cute.TiledMma
    fragment_b: cute.Tensor
    columns: int


@dataclass(frozen=True)
class MainloopParams:
    """Arguments of `multiply` beside the operands: the pipeline, and the stage and phase where it begins.

    k_tiles: how many stages are multiplied whole. tail_k_blocks: how many k blocks are of one more stage, in either of
    two forms: with `has_tail` a Python number, which holds where has_tail is true on the device; without it an Int32, 0
    for no such stage. unused: how many further stages are released unread. order_barrier: every warp arrives there when
    all stages have arrived. arrivals: what `release` takes beside a stage. pending: where MMAs are in flight whose
    accumulators are added to, instead of zeros: (their stage, whether there are any)."""

    pipeline: MainloopPipeline
    stage: Int32
    phase: Int32
    k_tiles: Int32
    unused: Int32 | None = None
    order_barrier: cute.Pointer | None = None
    arrivals: tuple = ()
    tail_k_blocks: int | Int32 | None = None
    has_tail: bool | None = None
    pending: tuple | None = None


def consumer_mma(dtype, k_major_a: bool, k_major_b: bool, columns: int):
    """Make one warpgroup's MMA: WARPGROUP_M x columns in one instruction."""
    return sm90.make_trivial_tiled_mma(
        dtype, dtype, major_mode(k_major_a), major_mode(k_major_b), Float32, (1, 1, 1), tiler_mn=(WARPGROUP_M, columns)
    )


def columns_of_last_tile(width: int, columns: int) -> int:
    """Count the columns of the last tile in whole epi tiles, where they are fewer than the other tiles'; otherwise 0."""
    return -(-(width % columns) // EPI_TILE_N) * EPI_TILE_N % columns


def consumer_fragments(tiled_mma, shared: Shared, half, columns: int):
    """Make a consumer warpgroup's operands, and its accumulator, which the MMA adds to."""
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    thread_mma = tiled_mma.get_slice(0)
    fragment_a = tiled_mma.make_fragment_A(
        thread_mma.partition_A(cute.local_tile(shared.a, (WARPGROUP_M, TILE_K), (half, 0, None)))
    )
    fragment_b = tiled_mma.make_fragment_B(thread_mma.partition_B(shared.b))
    accumulator = cute.make_rmem_tensor(tiled_mma.partition_shape_C((WARPGROUP_M, columns)), Float32)
    return fragment_a, fragment_b, accumulator


def narrow_tile(narrow_mma, shared: Shared, columns: int) -> Narrow | None:
    """Make a consumer's MMA and operand B for a narrower last tile; None without one."""
    if narrow_mma is None:
        return None
    narrow_mma.set(warpgroup.Field.ACCUMULATE, True)
    first = cute.local_tile(shared.b, (columns, TILE_K), (0, 0, None))
    fragment_b = narrow_mma.make_fragment_B(narrow_mma.get_slice(0).partition_B(first))
    return Narrow(narrow_mma, fragment_b, columns)


@cute.jit
def advance_by(stage: Int32, phase: Int32, count, stages: cutlass.Constexpr):
    """Advance the pipeline by a number of stages."""
    stage += count
    laps = stage // stages
    return stage - laps * stages, phase ^ (laps & 1)


@cute.jit
def issue(tiled_mma, accumulators, fragments_a, fragment_b, k_block, stage: Int32):
    """Start the MMAs of one k block of a stage."""
    for accumulator, fragment_a in zip(accumulators, fragments_a):
        cute.gemm(
            tiled_mma,
            accumulator,
            fragment_a[None, None, k_block, stage],
            fragment_b[None, None, k_block, stage],
            accumulator,
        )


@cute.jit
def commit_stage(pipeline: cutlass.Constexpr, previous: Int32, has_previous, stage: Int32, phase: Int32, arrivals):
    """Commit the issued MMAs of a stage: wait for those of the stage before, and release that one.

    Returns the stage committed, which is now the one before, and the pipeline's next stage with its phase.
    """
    warpgroup.commit_group()
    warpgroup.wait_group(1)
    if has_previous:
        pipeline.release(previous, *arrivals)
    previous = stage
    stage, phase = advance(stage, phase, pipeline.stages)
    return previous, stage, phase


@cute.jit
def multiply(tiled_mma, accumulators, fragments_a, fragment_b, params: cutlass.Constexpr):
    """Compute accumulator = A B^T over the stages that `params`, a MainloopParams, names; for each accumulator and A of
    two tuples, with the same B. Returns the pipeline's next stage and phase."""
    pipeline, stage, phase, k_tiles = params.pipeline, params.stage, params.phase, params.k_tiles
    unused, order_barrier, arrivals = params.unused, params.order_barrier, params.arrivals
    tail_k_blocks, has_tail, pending = params.tail_k_blocks, params.has_tail, params.pending
    if const_expr(pending is None):
        for accumulator in accumulators:
            accumulator.fill(0.0)
        pending = stage, False
    previous, has_previous = pending
    for k_tile in cutlass.range(k_tiles, unroll=1):
        pipeline.wait_full(stage, phase)
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(cute.size(fragment_b, mode=[2])):
            issue(tiled_mma, accumulators, fragments_a, fragment_b, k_block, stage)
        previous, stage, phase = commit_stage(pipeline, previous, has_previous or k_tile > 0, stage, phase, arrivals)
    has_previous = has_previous or k_tiles > 0
    if const_expr(tail_k_blocks is not None and has_tail is not None):
        if has_tail:
            pipeline.wait_full(stage, phase)
            warpgroup.fence()
            for k_block in cutlass.range_constexpr(tail_k_blocks):  # in a dynamic loop ptxas may serialise them
                issue(tiled_mma, accumulators, fragments_a, fragment_b, k_block, stage)
            previous, stage, phase = commit_stage(pipeline, previous, has_previous, stage, phase, arrivals)
            has_previous = has_tail
    elif const_expr(tail_k_blocks is not None):
        if tail_k_blocks > 0:
            pipeline.wait_full(stage, phase)
            warpgroup.fence()
            for k_block in cutlass.range(tail_k_blocks, unroll=1):
                issue(tiled_mma, accumulators, fragments_a, fragment_b, k_block, stage)
            previous, stage, phase = commit_stage(pipeline, previous, has_previous, stage, phase, arrivals)
            has_previous = tail_k_blocks > 0
    if const_expr(order_barrier is not None):
        pipeline.arrivals.arrive("order", order_barrier)
    warpgroup.wait_group(0)
    if has_previous:
        pipeline.release(previous, *arrivals)
    if const_expr(unused is not None):
        for _ in cutlass.range(unused, unroll=1):
            cute.arch.mbarrier_wait(pipeline.full + stage, phase)
            pipeline.release(stage)
            stage, phase = advance(stage, phase, pipeline.stages)
    return stage, phase


@cute.jit
def multiply_tile(
    tiled_mma,
    accumulators,
    fragments_a,
    fragment_b,
    narrow: cutlass.Constexpr,
    is_last,
    params: cutlass.Constexpr,
    mainloop: cutlass.Constexpr = multiply,
):
    """Run `mainloop` (`multiply`, or another with its parameters) on a tile: on the last tile of the columns with
    narrower instructions, if it `is_last` and there is a `narrow` one."""
    if const_expr(narrow is None):
        stage, phase = mainloop(tiled_mma, accumulators, fragments_a, fragment_b, params)
    else:
        stage, phase = Int32(0), Int32(0)
        if is_last:
            layout = cute.make_layout(narrow.mma.partition_shape_C((WARPGROUP_M, narrow.columns)))
            narrow_accumulators = tuple(cute.make_tensor(whole.iterator, layout) for whole in accumulators)
            stage, phase = mainloop(narrow.mma, narrow_accumulators, fragments_a, narrow.fragment_b, params)
        else:
            stage, phase = mainloop(tiled_mma, accumulators, fragments_a, fragment_b, params)
    return stage, phase
