"""The FP8 GEMMs run on a CPU, thread by thread, in hopper_simulator, beside the same arithmetic in PyTorch."""

import pytest
import torch

pytest.importorskip("triton")
from hopper_simulator import source
from hopper_simulator.layers import rows_of, use_simulator
from moe_problems import poisoned

from benchmarks.layer import fp8_trial

pytestmark = [pytest.mark.pinned, pytest.mark.slow]


@pytest.mark.parametrize(("H", "I"), [(336, 144), (512, 256)])
def test_up_and_down(monkeypatch, H, I):
    """Sizes that no tile or group divides, and others; a whole tile and a little, an expert without rows, half a tile."""
    use_simulator(monkeypatch)
    counts, T = (130, 0, 64), 60
    rows = rows_of(counts, T)
    x = torch.randn(T, H) * torch.logspace(-2, 2, H)
    gate_up = torch.randn(len(counts), 2 * I, H) * H**-0.5 * torch.logspace(-1, 1, 2 * I)[:, None]
    down = torch.randn(len(counts), H, I) * torch.logspace(-1, 1, I)
    scaled = (
        fp8_trial.rows_in_groups(x),
        fp8_trial.weight_in_blocks(gate_up, "concatenated"),
        fp8_trial.weight_in_blocks(down, "whole"),
    )
    with poisoned():
        fp8_trial.check(source.module("gemm_fp8"), *scaled, rows, blocks=2)
    assert rows.scheduler_state[0] == 0
