"""A consumer's product: wgmma over the stages of the ring, fp32 accumulators; a narrow tile by narrower instructions."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .core import DEPTH, HALF, PIECE, Shared, advance, major_mode


def consumer_mma(dtype, k_major_a: bool, k_major_b: bool, columns: int):
    """One warpgroup's product: HALF x columns of an instruction."""
    return sm90.make_trivial_tiled_mma(
        dtype, dtype, major_mode(k_major_a), major_mode(k_major_b), Float32, (1, 1, 1), tiler_mn=(HALF, columns)
    )


def narrower(width: int, columns: int) -> int:
    """Columns of the last tile, where it needs fewer pieces than the others; otherwise 0."""
    return -(-(width % columns) // PIECE) * PIECE % columns


def consumer_fragments(tiled_mma, shared: Shared, half, columns: int):
    """A consumer warpgroup's operands, and its accumulator; the product adds to it."""
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    of_thread = tiled_mma.get_slice(0)
    fragment_a = tiled_mma.make_fragment_A(
        of_thread.partition_A(cute.local_tile(shared.a, (HALF, DEPTH), (half, 0, None)))
    )
    fragment_b = tiled_mma.make_fragment_B(of_thread.partition_B(shared.b))
    accumulator = cute.make_rmem_tensor(tiled_mma.partition_shape_C((HALF, columns)), Float32)
    return fragment_a, fragment_b, accumulator


def narrow_fragment(narrow_mma, shared: Shared, columns: int):
    """B of a narrower last tile, or None."""
    if narrow_mma is None:
        return None
    narrow_mma.set(warpgroup.Field.ACCUMULATE, True)
    first = cute.local_tile(shared.b, (columns, DEPTH), (0, 0, None))
    return narrow_mma.make_fragment_B(narrow_mma.get_slice(0).partition_B(first))


@cute.jit
def skip(stage: Int32, phase: Int32, count, stages: cutlass.Constexpr):
    """`advance` by a number of stages."""
    stage += count
    laps = stage // stages
    return stage - laps * stages, phase ^ (laps & 1)


@cute.jit
def issue(tiled_mma, accumulators, fragments_a, fragment_b, block, stage: Int32):
    """Start the products of a block of 16 of a stage."""
    for accumulator, fragment_a in zip(accumulators, fragments_a):
        cute.gemm(
            tiled_mma, accumulator, fragment_a[None, None, block, stage], fragment_b[None, None, block, stage],
            accumulator,
        )  # fmt: skip


@cute.jit
def next_stage(ring: cutlass.Constexpr, previous: Int32, has_previous, stage: Int32, phase: Int32, arrivals):
    """When a stage's products have been started: those of the stage before are done, and it is released. Returns that
    stage, which is now the one before, and the ring's next with its phase."""
    warpgroup.commit_group()
    warpgroup.wait_group(1)
    if has_previous:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + previous, arrive_count=arrivals)
    previous = stage
    stage, phase = advance(stage, phase, ring.stages)
    return previous, stage, phase


@cute.jit
def multiply(
    tiled_mma, accumulators, fragments_a, fragment_b, ring: cutlass.Constexpr, stage: Int32, phase: Int32,
    depth_tiles: Int32, unused=None, arrived=None, arrivals=1, rest=None, begun=None,
):  # fmt: skip
    """accumulator = sum over `depth_tiles` stages of A B^T, and over the first `rest` blocks of 16 of one more where
    rest > 0, for each of a tuple of accumulators and A's; releases `unused` further stages as they are. Every warp
    arrives at the barrier `arrived` when all stages have, and counts for `arrivals` when it releases one. begun: (the
    stage before, whether there is one), whose products are under way and are added to. Returns the ring's next stage and
    phase."""
    if const_expr(begun is None):
        for accumulator in accumulators:
            accumulator.fill(0.0)
        begun = stage, False
    previous, some = begun
    for tile in cutlass.range(depth_tiles, unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        warpgroup.fence()
        for block in cutlass.range_constexpr(cute.size(fragment_b, mode=[2])):
            issue(tiled_mma, accumulators, fragments_a, fragment_b, block, stage)
        previous, stage, phase = next_stage(ring, previous, some or tile > 0, stage, phase, arrivals)
    some = some or depth_tiles > 0
    if const_expr(rest is not None):
        if rest > 0:
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            warpgroup.fence()
            for block in cutlass.range(rest, unroll=1):
                issue(tiled_mma, accumulators, fragments_a, fragment_b, block, stage)
            previous, stage, phase = next_stage(ring, previous, some, stage, phase, arrivals)
            some = rest > 0
    if const_expr(arrived is not None):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(arrived)
    warpgroup.wait_group(0)
    if some:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + previous, arrive_count=arrivals)
    if const_expr(unused is not None):
        for _ in cutlass.range(unused, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.empty + stage)
            stage, phase = advance(stage, phase, ring.stages)
    return stage, phase


@cute.jit
def multiply_tile(
    tiled_mma, narrow_mma, accumulators, fragments_a, fragment_b, narrow_b, last_columns: cutlass.Constexpr, is_last,
    others, by: cutlass.Constexpr = multiply,
):  # fmt: skip
    """`by` a function like `multiply`, with the `others` that it takes beside operands; the last tile by narrower
    instructions if there are any."""
    if const_expr(narrow_mma is None):
        stage, phase = by(tiled_mma, accumulators, fragments_a, fragment_b, *others)
    else:
        stage, phase = Int32(0), Int32(0)
        if is_last:
            layout = cute.make_layout(narrow_mma.partition_shape_C((HALF, last_columns)))
            narrow = tuple(cute.make_tensor(whole.iterator, layout) for whole in accumulators)
            stage, phase = by(narrow_mma, narrow, fragments_a, narrow_b, *others)
        else:
            stage, phase = by(tiled_mma, accumulators, fragments_a, fragment_b, *others)
    return stage, phase
