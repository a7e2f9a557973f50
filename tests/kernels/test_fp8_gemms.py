"""The FP8 GEMMs beside the same arithmetic in PyTorch: Hopper's run on a CPU, thread by thread, in hopper_simulator,
Triton's interpreted (or run, where there is a GPU), with e4m3 values as such and as bytes, as before sm_89."""

import pytest
import torch

pytest.importorskip("triton")
from fp8_problems import adapters_of, check, check_backward, step_of
from helpers.marks import rest_pinned, rest_slow
from hopper_simulator.layers import pairs_of, rows_of, use_simulator
from kernel_helpers import relative_error
from moe_problems import poisoned

from benchmarks.layer import fp8_trial
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels import eager, hopper, triton
from sonicmoe_hf.kernels.packed.fp8 import FP8_BLOCK
from sonicmoe_hf.kernels.scaled import SMALLEST_GRADIENT, scale_rows, transposed
from sonicmoe_hf.kernels.triton import config

COUNTS, T = (130, 0, 64), 60  # rows of the experts: a whole tile and a little, none, half a tile; tokens
TRITON = ["e4m3", "bytes"]


@pytest.fixture(params=[pytest.param("hopper", marks=[pytest.mark.pinned, pytest.mark.slow]), *rest_pinned(TRITON)])
def kernels(request, monkeypatch):
    if request.param == "hopper":
        use_simulator(monkeypatch)
        monkeypatch.setattr(hopper.triton, "routing_gradient", sum_of_parts)
        return hopper
    monkeypatch.setattr(config, "multiplies_fp8", lambda device: request.param == "e4m3")
    return triton


def on(kernels, device):
    """Find where a backend's problems are, and their rows."""
    if kernels is hopper:
        return torch.device("cpu"), rows_of(COUNTS, T)
    expert, token = (ids.to(device) for ids in pairs_of(COUNTS, T))
    return device, triton.dispatch(expert, token, T, len(COUNTS), True)


def packed_weights(H, I, device):
    """Make gate_up and down."""
    E = len(COUNTS)
    gate_up = torch.randn(E, 2 * I, H, device=device) * H**-0.5
    gate_up *= torch.logspace(-1, 1, 2 * I, device=device)[:, None]
    down = torch.randn(E, H, I, device=device) * torch.logspace(-1, 1, I, device=device)
    return fp8_trial.weight_in_blocks(gate_up, "concatenated"), fp8_trial.weight_in_blocks(down, "whole")


@pytest.mark.parametrize(
    ("H", "I", "rank"), [*rest_pinned([(336, 256, 72), (336, 144, 0)]), *rest_slow([(256, 144, 16)], 0)]
)
def test_up_and_down(kernels, device, H, I, rank):
    """Sizes that no tile or group divides, and others."""
    device, rows = on(kernels, device)
    x = torch.randn(T, H, device=device) * torch.logspace(-2, 2, H, device=device)
    adapters = adapters_of((2 * I, H), rank, rows.token.numel(), len(COUNTS), (1, 10), device)
    packed = packed_weights(H, I, device)
    with poisoned():
        check(scale_rows(x), *packed, rows, adapters, kernels)
    assert kernels is triton or rows.scheduler_state[0] == 0


@pytest.mark.parametrize(
    ("H", "I", "rank"), [*rest_pinned([(336, 384, 72), (336, 144, 0)]), *rest_slow([(256, 144, 16)], 0)]
)
def test_backward(kernels, device, H, I, rank):
    """Run the backward on the same sizes, and a last tile with one group; dout in sizes of gradients, below what
    values are taken to be."""
    device, rows = on(kernels, device)
    P = rows.token.numel()
    dout = torch.randn(T, H, device=device) * torch.logspace(-14, -9, H, device=device)
    h, routed = torch.randn(P, 2 * I, device=device).bfloat16(), torch.rand(P, device=device)
    adapters = adapters_of((I, H), rank, P, len(COUNTS), (1e-11, 10), device)
    weights = [transposed(*packed[:2]) for packed in packed_weights(H, I, device)]
    with poisoned():
        check_backward(scale_rows(dout, SMALLEST_GRADIENT), *weights, h, routed, rows, adapters, kernels)
    assert kernels is triton or rows.scheduler_state[0] == 0


def sum_of_parts(parts, like, bias, rows):
    """Sum a row as the Triton kernel does: parts in their order, at its pair."""
    num_rows = int(rows.offsets[-1])
    dw_P = torch.zeros(parts.shape[1])
    dw_P[rows.pair[:num_rows].long()] = parts[:, :num_rows].sum(0)
    return dw_P


@pytest.mark.parametrize(("size_out", "size_in"), rest_slow([(144, 336), (160, 144), (272, 128)]))
@pytest.mark.parametrize("parts", [1, 2])
def test_a_weight_is_transposed_bit_by_bit(device, size_out, size_in, parts):
    """Zeros pad the halves of gate and up to whole groups."""
    codes = torch.randint(256, (3, parts * size_out, size_in), dtype=torch.uint8, device=device)
    blocks = -(-size_out // FP8_BLOCK), -(-size_in // FP8_BLOCK)
    scales = torch.rand(3, parts, blocks[0], 1, blocks[1], device=device)
    found, expected = triton.transposed(codes, scales), transposed(codes, scales)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("kernels", TRITON, indirect=True)
def test_rows_are_scaled_as_in_pytorch(kernels, device):
    """Every code, zeros, subnormal codes, ties, NaN and infinity."""
    x = torch.randn(64, 336, device=device) * torch.logspace(-3, 3, 336, device=device)
    x[:8, :256] = torch.arange(-512, 512, 0.5, device=device).view(8, 256)
    x[8] = 0
    x[9, :128] = 448 * 2.0 ** -torch.arange(128, device=device)
    x[10, 5], x[11, 200], x[12, 300] = float("nan"), float("inf"), 1e-30
    found, expected = kernels.scale_rows(x), eager.scale_rows(x)
    finite = expected.scales.isfinite()
    assert relative_error(found.scales[finite], expected.scales[finite]) < 1e-6
    values, exact = found.values(), expected.values()
    assert torch.equal(values[10:12].isnan().any(1), exact[10:12].isnan().any(1))
    others = [row for row in range(64) if row not in (10, 11)]
    # a division that rounds otherwise moves a code on an edge
    assert (found.codes[others] != expected.codes[others]).float().mean() < 1e-3
    assert relative_error(values[others], exact[others]) < 2e-3


@pytest.mark.parametrize("kernels", rest_pinned(TRITON), indirect=True)
@pytest.mark.parametrize(("save", "rank"), rest_slow([("input", 8), ("preactivation", 0)]))
def test_a_layer_in_fp32_gives_what_the_eager_backend_gives(kernels, device, save, rank):
    """out, and the gradients of x, of the routing weights and of adapters. Sums differ in their order, by which a code
    on an edge may go to the other side: that moves dx by 1/16 of one of 144 values. Few rows an expert, and one
    without."""
    T, H, I, E, K = 30, 336, 144, 4, 2
    gate_up, down = torch.randn(E, 2 * I, H, device=device) * H**-0.5, torch.randn(E, H, I, device=device) * I**-0.5
    packed = [PackedWeight.quantize(gate_up, "fp8", order="concatenated"), PackedWeight.quantize(down, "fp8")]
    x = (torch.randn(T, H, device=device) * torch.logspace(-1, 1, H, device=device)).requires_grad_()
    routing = torch.rand(T, E - 1, device=device).topk(K).indices, torch.rand(T, K, device=device, requires_grad=True)
    step = step_of(x, packed, routing, rank, 0.3, 0.5, torch.ones_like(x), save)
    errors = [relative_error(*pair) for pair in zip(step("triton"), step("eager"))]
    assert max(errors) < 2e-3, errors
