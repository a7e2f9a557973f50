"""The Hopper kernels run on a CPU: their own source, thread by thread, in hopper_simulator.

Every case is a whole launch by the backend's own functions on a few blocks, with several work tiles for each, so that
stages and barriers are used again. A deadlock, a wrong arrive count or phase, memory written while it is read, an access
outside a tensor and a wrong coordinate fail. Results are beside the eager backend in fp32.
"""

import pytest
import torch

pytest.importorskip("triton")
from hopper_simulator.layers import rows_of, use_simulator
from moe_problems import poisoned

from sonicmoe_hf.kernels import eager, hopper
from sonicmoe_hf.kernels.hopper.config import Tile
from sonicmoe_hf.kernels.interface import UNGATED, Activation, LoraTerm
from sonicmoe_hf.tools.comparing import relative_error

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

BF16, FP16 = torch.bfloat16, torch.float16
# rows of the experts: a whole tile and a little, none, half a tile, more than half
COUNTS = (130, 0, 64, 70)
FEWER = (130, 0, 64)  # for bf16, whose residuals take most of the time
T = 60


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    use_simulator(monkeypatch)


def normal(*size, dtype, std=1.0):
    return (torch.randn(size) * std).to(dtype)


def weight(num_experts, columns, depth, dtype, transposed):
    """Make [E, columns, depth], stored as [E, depth, columns] if transposed."""
    if transposed:
        return normal(num_experts, depth, columns, dtype=dtype, std=depth**-0.5).transpose(1, 2)
    return normal(num_experts, columns, depth, dtype=dtype, std=depth**-0.5)


def lora_term(rank, num_pairs, num_experts, columns, dtype, transposed):
    if not rank:
        return None
    return LoraTerm(normal(num_pairs, rank, dtype=dtype), weight(num_experts, columns, rank, dtype, transposed))


def wide(value):
    """Convert to fp32."""
    if isinstance(value, LoraTerm):
        return LoraTerm(*(tensor.float() for tensor in value))
    return value.float() if isinstance(value, torch.Tensor) else value


def check_rows(found, expected, rows, roundings=1):
    """Check that results are as near to fp32 as that many roundings are, but for the order of sums; nothing is written
    past the rows there are.

    In fp16 what is computed with the product has two: rounding_error.py spares bf16 alone the product's own.
    """
    num_rows = int(rows.offsets[-1])
    assert found[num_rows:].isnan().all()
    found, expected = found[:num_rows], expected[:num_rows]
    assert relative_error(found, expected) <= 1.02 * roundings * relative_error(expected.to(found.dtype), expected)


def check_scheduler(rows):
    """Check the scheduler's state that the next launch relies on."""
    assert rows.scheduler_state[0] == 0


@pytest.mark.parametrize(
    ("tile", "dtype", "interleaved", "transposed", "rank", "name", "want"),
    [
        (Tile(128, 3), BF16, False, False, 0, "swiglu", (True, True)),
        (Tile(128, 3), FP16, True, True, 72, "clamped_swiglu", (True, True)),
        (Tile(256, 2), FP16, False, True, 8, "geglu", (True, True)),
        (Tile(128, 3), BF16, False, True, 0, "relu2", (True, True)),
    ],
)
def test_up(monkeypatch, tile, dtype, interleaved, transposed, rank, name, want):
    counts = FEWER if dtype == BF16 else COUNTS
    H, E = 104, len(counts)
    I = 136 if tile.columns == 256 or name in UNGATED else 72  # of h there are two tiles of columns, the second narrow
    monkeypatch.setattr(hopper, "tile", lambda *_: tile)
    rows, act = rows_of(counts, T), Activation(name, limit=2.0)
    width = act.width(I)
    x, gate_up = normal(T, H, dtype=dtype), weight(E, width, H, dtype, transposed)
    bias = normal(E, width, dtype=dtype)
    adapter = lora_term(rank, rows.token.numel(), E, width, dtype, transposed)
    with poisoned():
        found = hopper.up(x, gate_up, bias, rows, act, interleaved, *want, adapter)
    expected = eager.up(*map(wide, (x, gate_up, bias)), rows, act, interleaved, True, True, wide(adapter))
    of_a = 1 if dtype == BF16 else 2
    if name == "relu2":
        of_a *= 1.02  # a square has twice the error of the product's 12 bits
    for wanted, one, reference, roundings in zip(want, found, expected, (1, of_a)):
        assert (one is not None) == wanted
        if wanted:
            check_rows(one, reference, rows, roundings)
    check_scheduler(rows)


@pytest.mark.parametrize(
    ("I", "dtype", "interleaved", "transposed", "rank", "name"),
    [
        (136, BF16, False, True, 0, "swiglu"),
        (72, FP16, True, False, 8, "clamped_swiglu"),
        (136, FP16, False, True, 8, "relu2"),
    ],
)
def test_down_backward(monkeypatch, I, dtype, interleaved, transposed, rank, name):
    """Test I = 72 too, which makes four work tiles for three blocks, so that the last one is cut."""
    use_simulator(monkeypatch, blocks=3 if I == 72 else 2)
    counts = FEWER if dtype == BF16 else COUNTS
    H, E = 72, len(counts)
    monkeypatch.setattr(hopper, "tile", lambda *_: Tile(128, 3))
    rows, act = rows_of(counts, T), Activation(name, limit=2.0)
    num_pairs = rows.token.numel()
    dout, down = normal(T, H, dtype=dtype), weight(E, H, I, dtype, transposed)
    h, routing = normal(num_pairs, act.width(I), dtype=dtype), torch.rand(num_pairs)
    adapter = lora_term(rank, num_pairs, E, I, dtype, not transposed)
    monkeypatch.setattr(hopper.triton, "routing_gradient", lambda parts, *_: parts)
    with poisoned():
        dh, a, parts = hopper.down_backward(
            dout, down, None, h, routing, rows, act, interleaved, True, True, True, adapter
        )
    dh_exact, a_exact, dw_exact = eager.down_backward(
        *map(wide, (dout, down)), None, h.float(), routing, rows, act, interleaved, True, True, True, wide(adapter)
    )
    check_rows(dh, dh_exact, rows, 1 if dtype == BF16 else 2)
    check_rows(a, a_exact, rows)
    num_rows = int(rows.offsets[-1])
    assert parts[:, num_rows:].isnan().all()
    dw = parts[:, :num_rows].sum(0)
    # da' comes with 12 bits of each value or 11, whose errors mostly cancel in a sum
    assert relative_error(dw, dw_exact[rows.pair[:num_rows].long()]) < 2**-11
    check_scheduler(rows)


@pytest.mark.parametrize(
    ("tile", "dtype", "transposed", "rank", "bias"),
    [
        (Tile(256, 2), FP16, False, 0, True),
        (Tile(128, 4, static=True), BF16, False, 0, True),
        (Tile(128, 4), FP16, True, 24, False),
        (Tile(64, 3, 192), FP16, True, 72, True),
    ],
)
def test_down(monkeypatch, tile, dtype, transposed, rank, bias):
    I, H, E = 72, 264 if tile.columns == 256 else 200, len(COUNTS)
    monkeypatch.setattr(hopper, "gemm_down_tiles", lambda *_: (tile,) * 3)
    rows = rows_of(COUNTS, T)
    a, down = normal(rows.token.numel(), I, dtype=dtype), weight(E, H, I, dtype, transposed)
    bias = normal(E, H, dtype=dtype) if bias else None
    adapter = lora_term(rank, len(a), E, H, dtype, transposed)
    with poisoned():
        found = hopper.down(a, down, bias, rows, adapter)
    check_rows(found, eager.down(*map(wide, (a, down, bias)), rows, wide(adapter)), rows)
    check_scheduler(rows)


@pytest.mark.parametrize(("dtype", "transposed"), [(BF16, False), (FP16, True)])
def test_weight_gradient(monkeypatch, dtype, transposed):
    """gate_up's: the tile's 256 rows are of gate_up, its columns of x."""
    H, I, E = 200, 72, len(COUNTS)
    monkeypatch.setattr(hopper, "gemm_wgrad_tiles", lambda *_: (Tile(128, 3),) * 2)
    rows = rows_of(COUNTS, T)
    dh, x = normal(rows.token.numel(), 2 * I, dtype=dtype), normal(T, H, dtype=dtype)
    dh[int(rows.offsets[-1]) :] = torch.nan
    like = weight(E, 2 * I, H, dtype, transposed)
    with poisoned():
        found = hopper.gate_up_gradient(dh, x, rows, like)
    assert found.stride() == like.stride()
    expected = eager.gate_up_gradient(dh.float(), x.float(), rows, like.float())
    assert relative_error(found, expected) <= 1.02 * relative_error(expected.to(dtype), expected)
    assert (found[1] == 0).all(), "an expert without rows"
    check_scheduler(rows)
