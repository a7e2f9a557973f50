"""The FP8 GEMMs run on a CPU, thread by thread, in hopper_simulator, beside the same arithmetic in PyTorch."""

import pytest
import torch

pytest.importorskip("triton")
from hopper_simulator.layers import rows_of, use_simulator
from moe_problems import poisoned

from benchmarks.layer import fp8_trial
from sonicmoe_hf.kernels.interface import LoraTerm
from sonicmoe_hf.kernels.scaled import scale_rows

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
