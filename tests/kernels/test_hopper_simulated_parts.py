"""Parts of the Hopper kernels run from their source on a CPU, over more cases than whole kernels are: the schedules of
the tile scheduler, the activations, and the residuals of rounding."""

import functools
import itertools
import math
import random

import pytest
import torch

pytest.importorskip("triton")
from hopper_simulator import source
from hopper_simulator.launches import Copied, Fake
from hopper_simulator.machine import Machine
from hopper_simulator.tensors import BFloat16, Bits, Int32, Registers, bits_of, float_of, state

from sonicmoe_hf.kernels.eager import _activate, _activate_ungated
from sonicmoe_hf.kernels.hopper.config import TILE_M, Tile
from sonicmoe_hf.kernels.interface import GATED, UNGATED, Activation

pytestmark = pytest.mark.pinned

COUNTS_OF_ROWS = (0, 0, 1, 63, 64, 65, 127, 128, 129, 150, 192, 193, 256, 257, 320, 900)
KINDS = {  # class of kernel and tile: (gathers, rows of a tile, static, row tiles that pass over the columns together)
    "gathering": (True, TILE_M, False, 8),
    "static": (False, TILE_M, True, 8),
    "tall": (False, 192, False, 2),
    "cooperative": (False, TILE_M, False, 2),
}


def on_gpu(tensor):
    return Copied(Fake(Int32, tensor.shape, tuple(reversed(range(tensor.ndim))), 4), tensor).tensor


def random_tiles(draw):
    """Draw (the rows that there are by expert, the table of row tiles)."""
    counts = [draw.choice(COUNTS_OF_ROWS) for _ in range(draw.choice((1, 2, 5, 40)))]
    tiles, first = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, row, min(row + TILE_M, first + count)) for row in range(first, first + count, TILE_M)]
        first += count
    return counts, torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3)


def take_work_tiles(kernel, scheduler_class, counter, tiles, gpu, draw, done):
    """Run a block of one thread, which takes as long as it likes for a work tile."""
    scheduler = scheduler_class(counter, kernel.num_work_tiles(tiles), None, None, kernel.static, None)
    index, tile_count = scheduler.initial_index(), 1
    work_tile = yield from kernel.find_unmerged(tiles, scheduler, index)
    while work_tile[0] >= 0:
        done.append(work_tile)
        gpu.wake(gpu.current, later=draw.random())
        yield
        index = scheduler.prefetch(index, tile_count)
        work_tile = yield from kernel.find_unmerged(tiles, scheduler, (yield from scheduler.broadcast(index)))
        tile_count += 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_and_column_is_in_one_work_tile(kind):
    """Draw counts of rows, number of blocks and speed of each; the counter is zero again in the end."""
    gather, tile_rows, static, row_tiles_together = KINDS[kind]
    scheduling, varlen_m = source.module("tile_scheduler"), source.module("varlen_m")
    for seed in range(40):
        draw = random.Random(seed)
        state.gpu = gpu = Machine(seed, 1 << 16)
        counts, table = random_tiles(draw)
        tiles, counter = on_gpu(table), on_gpu(torch.zeros(1, dtype=torch.int32))
        kernel = varlen_m.VarlenMKernel(None, Tile(128, 3, tile_rows, static), gather)
        kernel.column_tiles, kernel.row_tiles_together = draw.choice((1, 2, 3, 11)), row_tiles_together
        done = []
        block = functools.partial(
            take_work_tiles, kernel, scheduling.TileScheduler, counter.iterator, tiles, gpu, draw, done
        )
        gpu.run(block, draw.choice((1, 3, 8, 132)), num_threads=1, lanes=1)
        assert counter[0] == 0, seed
        computed = [(row, column) for _, first, end, column in done for row in range(first, end)]
        assert sorted(computed) == [(r, c) for r in range(sum(counts)) for c in range(kernel.column_tiles)], seed
        expert_of_row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).tolist()
        assert all(expert_of_row[row] == e for e, first, end, _ in done for row in range(first, end)), seed
        assert all(end - first <= tile_rows for _, first, end, _ in done), seed


@pytest.mark.parametrize(("row_tiles", "column_tiles"), [(1, 3), (8, 2), (9, 4), (14, 1)])
def test_every_tile_of_a_weight_gradient_is_one_work_tile(row_tiles, column_tiles):
    kernel = source.module("gemm_wgrad").GemmWgradKernel(None, Tile(128, 3))
    kernel.row_tiles, kernel.column_tiles = row_tiles, column_tiles
    state.gpu = Machine(0, 1 << 16)
    offsets = on_gpu(torch.tensor([0, 5, 5, 300], dtype=torch.int32))
    found = [kernel.find_work_tile(offsets, index) for index in range(3 * row_tiles * column_tiles)]
    assert {(expert, start, end) for expert, start, end, _ in found} == {(0, 0, 5), (1, 5, 5), (2, 5, 300)}
    placed = [(expert, *kernel.tile_coordinates(tile)) for expert, _, _, tile in found]
    assert sorted(placed) == [(e, r, c) for e in range(3) for r in range(row_tiles) for c in range(column_tiles)]
    assert kernel.find_work_tile(offsets, -1)[0] == -1


@pytest.mark.parametrize("name", [*GATED, *UNGATED])
def test_an_activation_and_its_slopes_are_eager_s(name):
    """Compare in fp64, at and beyond a clamp's limits, at zero and for NaN as well. 1e-9: erf and exp2 differ by less."""
    act, is_gated = Activation(name, 1.3, 2.0), name in GATED
    draw = random.Random(0)
    special = (0.0, -0.0, 2.0, -2.0, 2.5, -2.5, 40.0, -40.0, math.nan)
    cases = [tuple(draw.gauss(0, 3) for _ in range(2 + is_gated)) for _ in range(100)]
    cases += itertools.product(*[special] * (1 + is_gated), (1.5, math.nan))
    *h, da = torch.tensor(cases, dtype=torch.float64).T
    expected = torch.stack((_activate if is_gated else _activate_ungated)(*h, act, da)).T
    activations = source.module("activations")
    activate = activations.activate if is_gated else activations.activate_ungated
    options = tuple(act) if is_gated else (name,)
    found = torch.tensor([activate(*h, *options, da) for *h, da in cases], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("truncated", "bound"), [(False, -10.64), (True, -11.64)])
def test_a_rounded_product_and_its_residual_are_the_product(truncated, bound):
    """Four bits below the 16, and half of what is left out on average: at most 1.28 * 2^-11 of the
    value, or half of it."""
    draw = random.Random(0)
    residual = source.module("rounding_error").Residual(0, truncated)
    for _ in range(300):
        scale = 10.0 ** draw.uniform(-3, 3)
        values = [[float_of(bits_of(draw.gauss(0, scale))) for _ in range(2)] for _ in range(4)]
        word = residual.word([[Bits(bits_of(value)) for value in pair] for pair in values])
        for j, pair in enumerate(values):
            kept = [float_of(bits_of(value) & 0xFFFF0000) if truncated else value for value in pair]
            for v, value in enumerate(pair):
                found = residual.value(Registers(BFloat16, (2,), kept), [word], v, j)
                assert abs(found - value) <= 2.0**bound * abs(value)


@pytest.mark.parametrize("value", (math.inf, -math.inf, 0.0, 3.3895e38))
def test_a_residual_keeps_what_is_not_finite(value):
    """A residual keeps what rounds to infinity or zero, too."""
    residual = source.module("rounding_error").Residual(0, False)
    word = residual.word([[Bits(bits_of(value))] * 2] * 4)
    found = residual.value(Registers(BFloat16, (2,), [value] * 2), [word], 0, 0)
    assert found == pytest.approx(value, rel=2.0**-10)
