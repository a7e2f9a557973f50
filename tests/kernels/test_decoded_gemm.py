"""kernels/hopper/decode.py on the simulator: packed weights decoded where the tile is loaded."""

import pytest
import torch

pytest.importorskip("triton")
from hopper_simulator.layers import rows_of, use_simulator
from moe_problems import poisoned

from sonicmoe_hf.kernels import eager, hopper
from sonicmoe_hf.kernels.hopper.config import Tile
from sonicmoe_hf.kernels.interface import Activation, LoraTerm, PackedOperand
from sonicmoe_hf.kernels.packed import FORMATS, Quantized
from sonicmoe_hf.tools.comparing import relative_error

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

BF16 = torch.bfloat16
COUNTS = (70, 0, 9)  # rows of the experts: more than half a tile, none, less than half
T = 40
TILE = Tile(128, 3)


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    use_simulator(monkeypatch)
    monkeypatch.setattr(hopper, "tile", lambda *_: TILE)
    monkeypatch.setattr(hopper, "gemm_down_tiles", lambda *_: (TILE,) * 3)
    monkeypatch.setattr(hopper, "reads_packed", lambda *_: False)  # whatever the number of rows


def normal(*size, std=1.0):
    return (torch.randn(size) * std).to(BF16)


def packed_weight(format, columns, depth, order="whole", dtype=None, group=None):
    """Make a weight [E, columns, depth] in a format, and the same expanded to bf16. dtype, group: of INT4's scales."""
    packed = FORMATS[format].quantize(torch.randn(len(COUNTS), columns, depth) * depth**-0.5, order)
    if group is not None:
        kept = [one if one is None else one[:, :, :: group // 32].contiguous() for one in packed[1:]]
        packed = Quantized(packed.codes, *kept)
    if dtype is not None:
        packed = packed._replace(scales=packed.scales.to(dtype) * torch.rand_like(packed.scales, dtype=dtype))
    return PackedOperand(*packed, format), FORMATS[format].dequantize(packed, BF16)


def check_rows(found, exact, rows):
    """Check that results are as near to fp32 as one rounding is, but for the order of sums, and that nothing is written
    past the rows there are."""
    num_rows = int(rows.offsets[-1])
    assert found[num_rows:].isnan().all()
    found, exact = found[:num_rows], exact[:num_rows]
    assert relative_error(found, exact) <= 1.02 * relative_error(exact.to(BF16), exact)


def wide(lora):
    return None if lora is None else LoraTerm(*(tensor.float() for tensor in lora))


@pytest.mark.parametrize(
    ("format", "dtype", "group", "across"),
    [
        ("int4", None, None, False),
        ("int4", torch.float16, 128, True),
        ("uint4", None, 64, False),
        ("nf4", None, None, False),
        ("nf4", None, None, True),
        ("mxfp4", None, None, True),
    ],
)
def test_values_are_those_of_expanding_to_the_bit(format, dtype, group, across):
    """A row of zeros and a one gives a row or a column of the weight."""
    columns, depth = (128, 72) if across else (72, 128)
    packed, weight = packed_weight(
        format, *((depth, columns) if across else (columns, depth)), dtype=dtype, group=group
    )
    if format == "mxfp4":
        packed.scales[:, 1] = torch.arange(4, dtype=torch.uint8) % 2  # subnormal powers
        packed.scales[:, 2] = 250
        weight = FORMATS[format].dequantize(Quantized(*packed[:3]), BF16)
    rows = rows_of((0, 0, 64), T, spare=0)
    depth_of_row = torch.randint(depth, (64,))
    source = torch.nn.functional.one_hot(depth_of_row, depth).to(BF16)
    if across:
        found, expected = hopper.up_backward_input(source, packed, rows), weight[2, depth_of_row]
    else:
        found, expected = hopper.down(source, packed, None, rows), weight[2, :, depth_of_row].T
    assert torch.equal(found, expected)


def test_up():
    """H is no multiple of the tile's depth, I none of half its columns."""
    H, I, rank, act = 96, 72, 8, Activation()
    rows, (packed, weight) = rows_of(COUNTS, T), packed_weight("int4", 2 * I, H)
    x, bias = normal(T, H), normal(len(COUNTS), 2 * I)
    lora = LoraTerm(normal(rows.token.numel(), rank), normal(len(COUNTS), 2 * I, rank, std=rank**-0.5))
    with poisoned():
        found = hopper.up(x, packed, bias, rows, act, False, True, True, lora)
    exact = eager.up(x.float(), weight.float(), bias.float(), rows, act, False, True, True, wide(lora))
    for one, reference in zip(found, exact):
        check_rows(one, reference, rows)
    assert rows.scheduler_state[0] == 0


@pytest.mark.parametrize("across", [False, True])
def test_products_of_rows(across):
    """down, and up_backward_input, which reads gate_up across; neither size is one of whole tiles."""
    columns, depth, rank = (160, 136, 8) if across else (136, 96, 0)
    rows = rows_of(COUNTS, T)
    packed, weight = packed_weight("int4", *((depth, columns) if across else (columns, depth)))
    source, lora = normal(rows.token.numel(), depth), None
    if rank:
        factor = normal(len(COUNTS), rank, columns, std=rank**-0.5).transpose(1, 2)
        lora = LoraTerm(normal(len(source), rank), factor)
    source[int(rows.offsets[-1]) :] = torch.nan
    with poisoned():
        if across:
            found = hopper.up_backward_input(source, packed, rows, lora)
        else:
            found = hopper.down(source, packed, None, rows, lora)
    weight = weight.float().transpose(1, 2) if across else weight.float()
    check_rows(found, eager.down(source.float(), weight, None, rows, wide(lora)), rows)
    assert rows.scheduler_state[0] == 0


def test_down_backward(monkeypatch):
    H, I, act = 72, 128, Activation()
    rows, (packed, weight) = rows_of(COUNTS, T), packed_weight("nf4", H, I)
    num_pairs = rows.token.numel()
    dout, h, routing = normal(T, H), normal(num_pairs, 2 * I), torch.rand(num_pairs)
    monkeypatch.setattr(hopper.triton, "routing_gradient", lambda partials, *_: partials)
    arguments = h, routing, rows, act, False, True, True, True
    with poisoned():
        dh, a, partials = hopper.down_backward(dout, packed, None, *arguments)
    exact = eager.down_backward(dout.float(), weight.float(), None, h.float(), *arguments[1:])
    check_rows(dh, exact[0], rows)
    check_rows(a, exact[1], rows)
    num_rows = int(rows.offsets[-1])
    # da' comes with 12 bits of each value, whose errors mostly cancel in a sum
    assert relative_error(partials[:, :num_rows].sum(0), exact[2][rows.pair[:num_rows].long()]) < 2**-11
