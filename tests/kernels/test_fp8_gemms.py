"""The FP8 GEMMs run on a CPU, thread by thread, in hopper_simulator, beside the same arithmetic in PyTorch."""

import pytest
import torch

pytest.importorskip("triton")
from hopper_simulator.layers import rows_of, use_simulator
from moe_problems import poisoned

from benchmarks.layer import fp8_trial
from sonicmoe_hf.kernels import hopper
from sonicmoe_hf.kernels.interface import LoraTerm
from sonicmoe_hf.kernels.scaled import SMALLEST_GRADIENT, scale_rows, transposed

pytestmark = [pytest.mark.pinned, pytest.mark.slow]


@pytest.mark.parametrize(("H", "I", "rank"), [(336, 144, 0), (336, 256, 72), (512, 144, 16)])
def test_up_and_down(monkeypatch, H, I, rank):
    """Sizes that no tile or group divides, and others; a whole tile and a little, an expert without rows, half a tile."""
    use_simulator(monkeypatch)
    counts, T = (130, 0, 64), 60
    rows = rows_of(counts, T)
    E, P = len(counts), rows.token.numel()
    x = torch.randn(T, H) * torch.logspace(-2, 2, H)
    gate_up = torch.randn(E, 2 * I, H) * H**-0.5 * torch.logspace(-1, 1, 2 * I)[:, None]
    down = torch.randn(E, H, I) * torch.logspace(-1, 1, I)
    adapters = None, None
    if rank:
        adapters = [
            LoraTerm(torch.randn(P, rank).bfloat16(), 10 * torch.randn(E, width, rank).bfloat16())
            for width in (2 * I, H)
        ]
    packed = fp8_trial.weight_in_blocks(gate_up, "concatenated"), fp8_trial.weight_in_blocks(down, "whole")
    with poisoned():
        fp8_trial.check(scale_rows(x), *packed, rows, adapters)
    assert rows.scheduler_state[0] == 0


@pytest.mark.parametrize(("H", "I", "rank"), [(336, 144, 0), (336, 384, 72), (512, 144, 16)])
def test_backward(monkeypatch, H, I, rank):
    """The same sizes, and a last tile with one group; dout in sizes of gradients, below what values are taken to be."""
    use_simulator(monkeypatch)
    monkeypatch.setattr(hopper.triton, "routing_gradient", sum_of_parts)
    counts, T = (130, 0, 64), 60
    rows = rows_of(counts, T)
    E, P = len(counts), rows.token.numel()
    dout = torch.randn(T, H) * torch.logspace(-14, -9, H)
    gate_up = torch.randn(E, 2 * I, H) * H**-0.5 * torch.logspace(-1, 1, 2 * I)[:, None]
    down = torch.randn(E, H, I) * torch.logspace(-1, 1, I)
    h, routed, adapters = torch.randn(P, 2 * I).bfloat16(), torch.rand(P), (None, None)
    if rank:
        adapters = [
            LoraTerm(1e-11 * torch.randn(P, rank).bfloat16(), 10 * torch.randn(E, width, rank).bfloat16())
            for width in (I, H)
        ]
    weights = [
        transposed(*fp8_trial.weight_in_blocks(weight, order)[:2])
        for weight, order in ((gate_up, "concatenated"), (down, "whole"))
    ]
    with poisoned():
        fp8_trial.check_backward(scale_rows(dout, SMALLEST_GRADIENT), *weights, h, routed, rows, adapters)
    assert rows.scheduler_state[0] == 0


def sum_of_parts(parts, like, bias, rows):
    """What the Triton kernel gives of a row: parts in their order, at its pair."""
    num_rows = int(rows.offsets[-1])
    dw_P = torch.zeros(parts.shape[1])
    dw_P[rows.pair[:num_rows].long()] = parts[:, :num_rows].sum(0)
    return dw_P
