"""Packed weights decoded where a Hopper GEMM loads the tile, on a Hopper GPU: to the bit what expanding gives, and every
product and gradient as exact as with weights in bf16."""

from unittest import mock

import pytest
import torch
from test_hopper_adapters_gpu import Problem, check, pytestmark  # noqa: F401
from test_triton_gpu import _exact_fp32_reference  # noqa: F401

from benchmarks.common.shapes import Shape, problem
from benchmarks.layer.decoded_trial import errors_of, steps_of
from sonicmoe_hf.kernels import hopper as backend
from sonicmoe_hf.kernels.hopper.config import MAX_DECODED_ROWS
from sonicmoe_hf.kernels.interface import PackedOperand
from sonicmoe_hf.kernels.packed import FORMATS, Quantized

KINDS = {name: (name, None, 1) for name in MAX_DECODED_ROWS} | {
    "int4, scales of 128 in fp16": ("int4", torch.float16, 4),
    "int4, scales of 64 in fp32": ("int4", torch.float32, 2),
}


def pack(kind, weight, order="whole"):
    """Pack a weight in a format, of INT4 with every `step`-th scale in a dtype."""
    format, dtype, step = KINDS[kind]
    packed = FORMATS[format].quantize(weight, order)
    if dtype is not None:
        # values that bf16 does not have
        packed = packed._replace(scales=packed.scales[:, :, ::step].to(dtype).contiguous() * 1.0123)
    return PackedOperand(*packed, format)


def expand(packed):
    return FORMATS[packed.format].dequantize(Quantized(*packed[:3]), torch.bfloat16)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_expanding_to_the_bit(hopper, kind, across):
    """Rows of zeros and a one give rows or columns of the weight. The sizes are those of no whole tiles, and MXFP4 has
    all scales that give finite values."""
    E, size_out, size_in = 5, 328, 640
    packed = pack(kind, torch.randn(E, size_out, size_in, device="cuda") * 0.02)
    if kind == "mxfp4":
        packed.scales.copy_(torch.randint(0, 253, packed.scales.shape, device="cuda", dtype=torch.uint8))
    weight = expand(packed)
    depth = size_out if across else size_in
    expert = torch.arange(E, device="cuda").repeat_interleave(depth)
    expert = expert[expert != 1]  # an expert has no rows
    rows = hopper.dispatch(expert, torch.arange(len(expert), device="cuda"), len(expert), E, True)
    source = torch.eye(depth, device="cuda", dtype=torch.bfloat16).repeat(E - 1, 1)
    found, dense = (
        hopper.up_backward_input(source, one, rows) if across else hopper.down(source, one, None, rows)
        for one in (packed, weight)
    )
    assert torch.equal(found, dense)
    expected = (weight if across else weight.mT)[[0, 2, 3, 4]].flatten(0, 1)
    normal = expected.abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(found[normal], expected[normal])


class PackedProblem(Problem):
    """Both weights are packed."""

    def __init__(self, hopper, kind, rank, layout, **sizes):
        super().__init__(hopper, rank or 8, layout, H=384, I=256, **sizes)
        if not rank:
            self.extras = dict.fromkeys(self.extras)
        gate_up, down = pack(kind, self.operands.gate_up, layout), pack(kind, self.operands.down)
        self.operands = self.operands._replace(gate_up=gate_up, down=down)


def exact(operand):
    return (expand(operand) if isinstance(operand, PackedOperand) else operand).float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rank", "layout"), [(0, "concatenated"), (16, "concatenated"), (104, "interleaved")])
def test_every_product(hopper, kind, rank, layout):
    check(PackedProblem(hopper, kind, rank, layout), hopper, exact)


@pytest.mark.parametrize("kind", ("nf4", "int4"))
def test_tiles_of_64_rows(hopper, kind):
    """Experts have 40 rows on average, more than Triton reads packed weights for."""
    check(PackedProblem(hopper, kind, 16, "concatenated", T=160), hopper, exact)


@pytest.mark.parametrize("format", MAX_DECODED_ROWS)
def test_a_layer_s_outputs_and_gradients(format):
    """As exact as with expanded weights; nothing is expanded."""
    shape = Shape(700, 384, 256, 16, 4)
    inputs = problem(shape)
    steps, dense = steps_of(shape, inputs, format)
    errors_of(steps, inputs, dense)
    with mock.patch.object(backend, "dequantize", side_effect=AssertionError("expanded")):
        steps["decoded"]()
