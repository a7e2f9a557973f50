"""FP8 products on a GPU: kernels beside the same arithmetic in PyTorch, and layers beside the eager backend's."""

import pytest
import torch
from fp8_problems import adapters_of, check, check_gradients, step_of
from kernel_helpers import relative_error

from benchmarks.layer import fp8_trial
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels import eager, triton
from sonicmoe_hf.layer import backends

pytestmark = pytest.mark.gpu
SIZES = ((67, 336, 144, 7, 2), (300, 1024, 768, 4, 3), (3000, 784, 1040, 33, 3))  # T, H, I, E, K


@pytest.fixture
def kernels(backend):
    return backends.load(backend)


def problem(sizes):
    """Make the shape, and fp8_trial's problem of it, in which every third of more than four experts has no rows."""
    shape = fp8_trial.shape_of(",".join(map(str, sizes)))
    return shape, *fp8_trial.problem(shape, skipped=range(0, shape.E, 3) if shape.E > 4 else ())


@pytest.mark.parametrize("rank", [0, 16, 104])
@pytest.mark.parametrize("sizes", (*SIZES, (2000, 2048, 384, 8, 4)))
def test_kernels_are_as_near_as_roundings_are(kernels, sizes, rank):
    """`check` compares, and says why its bounds are what they are; every third expert may have no rows."""
    _, x, gate_up, down, rows = problem(sizes)
    adapters = adapters_of((gate_up.shape[1], down.shape[1]), rank, rows.token.numel(), len(gate_up), (1, 1), "cuda")
    scaled = fp8_trial.quantized(x, gate_up, down)
    errors = check(*scaled, rows, adapters, kernels)
    assert errors == check(*scaled, rows, adapters, kernels), "another result the second time"


@pytest.mark.parametrize("rank", [0, 16, 104])
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_of_backward_are_as_near_as_roundings_are(kernels, sizes, rank):
    """`check_gradients`; with adapters, of one size with da' and dx."""
    shape, x, gate_up, down, rows = problem(sizes)
    adapters = adapters_of((shape.I, shape.H), rank, rows.token.numel(), len(gate_up), (1e-9, 1), "cuda")
    check_gradients(shape, *fp8_trial.quantized(x, gate_up, down)[1:], rows, adapters, kernels)


def test_rows_are_scaled_as_in_pytorch():
    """Hopper's and Triton's kernels are the same here."""
    x = torch.randn(1000, 2064, device="cuda").bfloat16() * torch.logspace(-3, 3, 2064, device="cuda").bfloat16()
    x[5] = 0
    found, expected = triton.scale_rows(x), eager.scale_rows(x)
    assert relative_error(found.scales, expected.scales) < 1e-6
    # a division that rounds otherwise moves a code on an edge
    assert (found.codes != expected.codes).float().mean() < 1e-3
    assert relative_error(found.values(), expected.values()) < 2e-3


@pytest.mark.parametrize("rank", [0, 8, 72])
@pytest.mark.parametrize("save", ["preactivation", "input"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_layer_gives_what_the_eager_backend_gives(backend, sizes, save, rank):
    """out, and the gradients of x, of the routing weights and of adapters.

    h and y are rounded to bf16 (0.17%), and where h's last bit differs, a's code may: 1.5% is a quarter of e4m3's error.
    dx comes from h and dh, each with codes of its own: 2.5%.
    """
    T, H, I, E, K = sizes
    torch.manual_seed(0)
    weights = [
        PackedWeight.quantize((torch.randn(E, n, k, device="cuda") * k**-0.5).bfloat16(), "fp8", order=order)
        for n, k, order in ((2 * I, H, "concatenated"), (H, I, "whole"))
    ]
    x = torch.randn(T, H, device="cuda").bfloat16().requires_grad_()
    expert = torch.rand(T, E, device="cuda").topk(K).indices
    routed = torch.rand(T, K, device="cuda", requires_grad=True)
    dout = torch.randn(T, H, device="cuda").bfloat16()
    step = step_of(x, weights, (expert, routed), rank, 0.1, 2.0, dout, save)
    found, expected, bf16 = step(backend), step("eager"), step(backend, None)
    errors = [relative_error(*pair) for pair in zip(found, expected)]
    assert errors[0] < 0.015 and max(errors) < 0.025, errors
    assert 0.01 < relative_error(found[0], bf16[0]) < 0.1, "FP8 has an error of its own"
