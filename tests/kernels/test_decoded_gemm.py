"""The trial of kernels/hopper/decode.py on the simulator: INT4 weights decoded where the tile is loaded."""

import pytest
import torch

pytest.importorskip("triton")
from hopper_simulator.layers import rows_of, use_simulator
from moe_problems import poisoned

from benchmarks.common.shapes import Shape, problem
from benchmarks.layer import decoded_trial
from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels.hopper.config import Tile
from sonicmoe_hf.kernels.interface import Activation, LoraTerm, PackedOperand
from sonicmoe_hf.kernels.packed import FORMATS, Quantized
from sonicmoe_hf.tools.comparing import relative_error

pytestmark = [pytest.mark.pinned, pytest.mark.slow]

BF16 = torch.bfloat16
COUNTS = (70, 0, 9)  # rows of the experts: more than half a tile, none, less than half
T = 40


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    use_simulator(monkeypatch)


def normal(*size, std=1.0):
    return (torch.randn(size) * std).to(BF16)


def packed_weight(columns, depth, order="whole"):
    """Make a weight [E, columns, depth] in INT4, and the same expanded to bf16."""
    packed = FORMATS["int4"].quantize(torch.randn(len(COUNTS), columns, depth) * depth**-0.5, order)
    return packed, FORMATS["int4"].dequantize(packed, BF16)


def check_rows(found, exact, rows):
    """Check that results are as near to fp32 as one rounding is, but for the order of sums, and that nothing is written
    past the rows there are."""
    num_rows = int(rows.offsets[-1])
    assert found[num_rows:].isnan().all()
    found, exact = found[:num_rows], exact[:num_rows]
    assert relative_error(found, exact) <= 1.02 * relative_error(exact.to(BF16), exact)


def wide(lora):
    return None if lora is None else LoraTerm(*(tensor.float() for tensor in lora))


def test_up():
    """H is no multiple of the tile's depth, I none of half its columns."""
    H, I, rank, act = 96, 72, 8, Activation()
    rows, (packed, weight) = rows_of(COUNTS, T), packed_weight(2 * I, H, "concatenated")
    x = normal(T, H)
    lora = LoraTerm(normal(rows.token.numel(), rank), normal(len(COUNTS), 2 * I, rank, std=rank**-0.5))
    with poisoned():
        found = decoded_trial.up(x, packed, None, rows, act, False, True, True, lora, Tile(128, 3))
    exact = eager.up(x.float(), weight.float(), None, rows, act, False, True, True, wide(lora))
    for one, reference in zip(found, exact):
        check_rows(one, reference, rows)
    assert rows.scheduler_state[0] == 0


@pytest.mark.parametrize("across", [False, True])
def test_products_of_rows(across):
    """down, and up_backward_input, which reads gate_up across; neither size is one of whole tiles."""
    columns, depth, rank = (160, 200, 8) if across else (200, 96, 0)
    rows = rows_of(COUNTS, T)
    packed, weight = packed_weight(*((depth, columns) if across else (columns, depth)))
    source, lora = normal(rows.token.numel(), depth), None
    if rank:
        factor = normal(len(COUNTS), rank, columns, std=rank**-0.5).transpose(1, 2)
        lora = LoraTerm(normal(len(source), rank), factor)
    source[int(rows.offsets[-1]) :] = torch.nan
    with poisoned():
        found = decoded_trial.product(source, packed, across, rows, lora, Tile(128, 3))
    weight = weight.float().transpose(1, 2) if across else weight.float()
    check_rows(found, eager.down(source.float(), weight, None, rows, wide(lora)), rows)
    assert rows.scheduler_state[0] == 0


def test_down_backward(monkeypatch):
    H, I, act = 72, 96, Activation()
    rows, (packed, weight) = rows_of(COUNTS, T), packed_weight(H, I)
    num_pairs = rows.token.numel()
    dout, h, routing = normal(T, H), normal(num_pairs, 2 * I), torch.rand(num_pairs)
    monkeypatch.setattr(decoded_trial.hopper.triton, "routing_gradient", lambda partials, *_: partials)
    arguments = h, routing, rows, act, False, True, True, True
    with poisoned():
        dh, a, partials = decoded_trial.down_backward(dout, packed, None, *arguments, chosen=Tile(128, 3))
    exact = eager.down_backward(dout.float(), weight.float(), None, h.float(), *arguments[1:])
    check_rows(dh, exact[0], rows)
    check_rows(a, exact[1], rows)
    num_rows = int(rows.offsets[-1])
    # da' comes with 12 bits of each value, whose errors mostly cancel in a sum
    assert relative_error(partials[:, :num_rows].sum(0), exact[2][rows.pair[:num_rows].long()]) < 2**-11


def test_the_layer_gives_packed_experts_to_all_four_products():
    """The benchmark's step, on the eager backend with products that expand the weight they get."""
    shape, called = Shape(40, 64, 64, 4, 2), set()

    def expanding(name):
        original, place = getattr(eager, name), 1

        def product(*arguments, **options):
            assert isinstance(arguments[place], PackedOperand)
            called.add(name)
            dense = FORMATS["int4"].dequantize(Quantized(*arguments[place][:3]), BF16)
            return original(*arguments[:place], dense, *arguments[place + 1 :], **options)

        return product

    functions = {name: expanding(name) for name in decoded_trial.DECODED}
    inputs = problem(shape, device="cpu")
    steps, dense = decoded_trial.steps_of(shape, inputs)
    steps["decoded"].kernels, steps["decoded"].functions = eager, functions
    errors = decoded_trial.errors_of(steps, inputs, dense)
    assert called == decoded_trial.DECODED.keys() and errors["decoded"] == errors["expanded"]
