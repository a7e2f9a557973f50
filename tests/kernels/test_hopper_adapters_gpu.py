"""Low-rank adapters inside the Hopper GEMMs, on a Hopper GPU: every product beside the eager backend's in fp32.

The bar is that of test_triton_gpu.py: 1.15 times the error of the exact result rounded to the tensors' dtype once. In
fp16, where the epilogue reads a product that has been rounded already, twice that error for what is computed from
one."""

import pytest
import torch
from kernel_helpers import errors, same_bits
from kernel_products import operands
from moe_problems import AdaptedLayer, packed_adapter, poisoned, routing_ids
from test_triton_gpu import _exact_fp32_reference  # noqa: F401

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.kernels.hopper.config import TALL, WIDE, gemm_down_tiles, row_bucket
from sonicmoe_hf.kernels.interface import Activation, LoraTerm
from sonicmoe_hf.layer.config import LAYOUTS
from sonicmoe_hf.tools.comparing import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
RANKS = (8, 16, 24, 64, 100, 256)
MAX_DW_ERROR = 1e-3  # a sum of I products of da', which the epilogue sees to 2^-11


class Problem:
    """A layer in a layout, adapters of both weights, a different one for every expert, and operands of every product.

    Row tensors are NaN past the last row.
    """

    def __init__(self, backend, rank, layout, T=3001, H=264, I=200, E=16, K=4, dtype=torch.bfloat16, kind="list"):
        expert, token = routing_ids(T, E, K, kind, "cuda", empty=(0, 7))
        self.rows = backend.dispatch(expert, token, T, E, True)
        self.num_rows, num_pairs = int(self.rows.offsets[-1]), expert.numel()
        self.operands = operands(T, H, I, E, num_pairs, layout, 0, "cuda", dtype, activation=Activation())

        def of_rows(width):
            tensor = torch.randn(num_pairs, width, device="cuda").to(dtype)
            tensor[self.num_rows :] = float("nan")
            return tensor

        def adapter(weight):
            _, size_out, size_in = weight.shape
            a = torch.randn(E, rank, size_in, device="cuda") * rank**-0.5
            return packed_adapter(a, torch.randn(E, size_out, rank, device="cuda") * rank**-0.5, 1.0, weight)

        self.h, self.a, self.dh = of_rows(2 * I), of_rows(I), of_rows(2 * I)
        first, second = adapter(self.operands.gate_up), adapter(self.operands.down)
        padded = first.a.mT.shape[2]
        self.extras = {
            "up": first.term(of_rows(padded)),
            "down": second.term(of_rows(padded)),
            "down_backward": second.transposed_term(of_rows(padded)),
            "up_backward_input": first.transposed_term(of_rows(padded)),
        }

    def products(self, kernels, extras, convert=lambda tensor: tensor):
        """Compute every product by name, up to the last row; `convert` is applied to all operands."""
        x, gate_up, down, weight, dout, bias, down_bias = map(convert, self.operands[:7])
        of_h, of_a, of_dh = map(convert, (self.h, self.a, self.dh))
        lora = {name: LoraTerm(*map(convert, value)) if value else None for name, value in extras.items()}
        gated = self.rows, self.operands.activation, self.operands.interleaved
        h, a = kernels.up(x, gate_up, bias, *gated, True, True, lora=lora["up"])
        y = kernels.down(of_a, down, down_bias, self.rows, lora=lora["down"])
        dh, weighted_a, dw = kernels.down_backward(
            dout, down, down_bias, of_h, weight, *gated, True, True, True, lora=lora["down_backward"]
        )
        dx = kernels.up_backward_input(of_dh, gate_up, self.rows, lora=lora["up_backward_input"])
        by_row = {"h": h, "a": a, "y": y, "dh": dh, "weighted_a": weighted_a, "dx": dx}
        return {"dw": dw, **{name: tensor[: self.num_rows] for name, tensor in by_row.items()}}


def check(problem, hopper, exact=torch.Tensor.float):
    """Check every product; exact: makes an operand one in fp32."""
    exact = problem.products(eager, problem.extras, exact)
    with poisoned():
        found = problem.products(hopper, problem.extras)
    dtype = problem.operands.x.dtype
    rounded_once = {name: relative_error(tensor.to(dtype), tensor) for name, tensor in exact.items()}
    in_fp16 = dtype == torch.float16
    allowed = {
        name: (2.0 if in_fp16 and name in ("a", "dh") else 1.15) * error for name, error in rounded_once.items()
    }
    allowed["dw"] = MAX_DW_ERROR
    assert {n: (e, allowed[n]) for n, e in errors(found, exact).items() if e > allowed[n]} == {}
    assert same_bits(problem.products(hopper, problem.extras), found), "a rerun gave other bits"


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_product_with_an_adapter(hopper, rank, layout):
    check(Problem(hopper, rank, layout), hopper)


@pytest.mark.parametrize("rank", (8, 100))
@pytest.mark.parametrize("layout", ("concatenated", "transposed_interleaved"))
def test_fp16(hopper, rank, layout):
    check(Problem(hopper, rank, layout, dtype=torch.float16), hopper)


@pytest.mark.parametrize("rank", (16, 104))
@pytest.mark.parametrize("layout", ("concatenated", "transposed_interleaved"))
def test_about_128_rows_per_expert(hopper, rank, layout):
    """down and up_backward_input take an expert's last tile of up to 64 rows with the one before."""
    T, H, I, E, K = 1101, 576, 328, 32, 4
    assert gemm_down_tiles(H, I)[row_bucket(T * K, E)] == TALL
    check(Problem(hopper, rank, layout, T, H, I, E, K, kind="top_k"), hopper)


@pytest.mark.parametrize("rank", (16, 104))
@pytest.mark.parametrize("layout", ("concatenated", "transposed_interleaved"))
def test_many_rows_of_deep_products(hopper, rank, layout):
    """down and up_backward_input have cooperative consumers and epilogue warps."""
    T, H, I, E, K = 3001, 512, 1544, 8, 4
    assert all(gemm_down_tiles(H, depth)[row_bucket(T * K, E)] == WIDE for depth in (I, 2 * I))
    check(Problem(hopper, rank, layout, T, H, I, E, K, kind="top_k"), hopper)


@pytest.mark.parametrize("rank", (8, 64, 136))
def test_an_adapter_of_zeros_leaves_every_bit(hopper, rank):
    """An adapter's k blocks hold nothing of other stages, rows or experts."""
    problem = Problem(hopper, rank, "interleaved")
    zeros = {name: LoraTerm(rows, torch.zeros_like(factor)) for name, (rows, factor) in problem.extras.items()}
    without = problem.products(hopper, dict.fromkeys(zeros))
    assert same_bits(problem.products(hopper, zeros), without)


def test_few_rows_per_expert_and_other_orders_fall_back():
    """Fall back in up and down_backward where experts have few rows, and for a factor in another order than the
    weight's."""
    from sonicmoe_hf.kernels import hopper

    problem = Problem(hopper, 16, "concatenated", T=100)
    exact = problem.products(eager, problem.extras, torch.Tensor.float)
    assert all(error < 1e-2 for error in errors(problem.products(hopper, problem.extras), exact).values())
    problem = Problem(hopper, 16, "concatenated")
    exact = problem.products(eager, problem.extras, torch.Tensor.float)
    other = {
        name: LoraTerm(rows, factor.transpose(1, 2).contiguous().transpose(1, 2))
        if factor.is_contiguous()
        else LoraTerm(rows, factor.contiguous())
        for name, (rows, factor) in problem.extras.items()
    }
    assert all(error < 1e-2 for error in errors(problem.products(hopper, other), exact).values())


@pytest.mark.parametrize("layout", ("concatenated", "transposed_interleaved"))
def test_a_layer_with_frozen_experts_and_trained_adapters(hopper, layout):
    """Gradients of the adapters, x and the routing weights; eager in fp32 is exact, eager in bf16 is what is allowed."""
    problem = AdaptedLayer(16, layout, 2000, 256, 192, empty=(3,), bias=False, scales=(0.5, 0.5))
    exact = problem.step("eager", torch.float32)
    allowed, found = (errors(problem.step(backend), exact) for backend in ("eager", "hopper"))
    assert {n: (e, allowed[n]) for n, e in found.items() if e > 1.1 * allowed[n]} == {}
    assert same_bits(problem.step("hopper"), problem.step("hopper"))
