"""Benchmarks of several GPUs, on two ranks of a CPU: each ends with an error where what it checks fails."""

import os
import subprocess
import sys

import pytest

ULYSSES = ("--layers", "2", "--lengths", "256", "--ulysses", "--experts", "bf16")


@pytest.mark.pinned
@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "options", "said"),
    [
        ("expert_parallel", ("--tokens", "64", "--steps", "1"), "losses and gradients of the top-k cases agree"),
        ("long", ULYSSES, "2 ranks: loss"),
    ],
)
def test_ranks_train_alike(benchmark, options, said, tmp_path):
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    where = ["--device", "cpu", "--tiny", "--csv", str(tmp_path / "table.csv")]
    command = [*ranks, "-m", f"benchmarks.step.{benchmark}", *where, *options]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and said in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "table.csv").read_text().count(",ms,")
