"""Triton kernels compiled ahead by other processes, for a GPU that need not be there."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from sonicmoe_hf.kernels.announce import LOCAL_RANKS
from sonicmoe_hf.kernels.listing import TritonLaunch
from sonicmoe_hf.kernels.triton import ahead

pytestmark = pytest.mark.pinned

IN_A_PROCESS = """
import os, time, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from sonicmoe_hf.kernels import triton
from sonicmoe_hf.kernels.listing import list_kernels
from sonicmoe_hf.kernels.triton import ahead, config

config.gpu_kind = lambda device: "hopper"
driver.set_active(ahead._Driver(GPUTarget("cuda", 90, 32)))
with list_kernels() as kernels:
    triton.dispatch(torch.empty(64, 8, dtype=torch.int64, device="meta"), None, 64, 16, False)
(launch,) = kernels.triton
ahead.compile_ahead(kernels.triton)
folder = os.environ["TRITON_CACHE_DIR"]
deadline = time.monotonic() + 500
while not any(name.startswith("sonicmoe_hf-") for name in os.listdir(folder)) and time.monotonic() < deadline:
    time.sleep(0.05)
found = set(os.listdir(folder))
tensors = [tensor if tensor is None else torch.empty(64, dtype=tensor.dtype) for tensor in launch.tensors]
launch.kernel.warmup(*tensors, *launch.numbers, *launch.constants, grid=(1,), **launch.options)
assert len(found) > 1 and set(os.listdir(folder)) == found, "Triton found what another process had compiled"
ahead.start_call = None
ahead.compile_ahead(kernels.triton)
"""


@pytest.mark.slow
def test_triton_finds_in_its_cache_what_another_process_compiled(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def add_kernel(to):
    pass


@pytest.fixture
def shares(monkeypatch, tmp_path):
    """List the shares of kernels that processes were begun for, in a process that no launcher started."""
    begun = []
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", ahead._Driver(GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(ahead, "start_call", lambda module, function, target, share, mark: begun.append((share, mark)))
    return begun


def launches(count):
    """Make launches of as many kernels, two of each."""
    kernel = JITFunction(add_kernel)
    tensor = torch.empty(1, device="meta")
    return [TritonLaunch(kernel, (tensor,), (), (number,), {"num_warps": 4}) for number in (*range(count),) * 2]


@pytest.mark.parametrize(
    ("count", "cpus", "rank", "sizes"),
    [(0, 8, "0", []), (3, 8, "0", [3]), (9, 8, "0", [3, 3, 3]), (9, 2, "0", [9]), (9, 1, "0", []), (9, 8, "1", [])],
)
def test_processes_share_the_kernels(monkeypatch, shares, count, cpus, rank, sizes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cpus))
    monkeypatch.setenv("LOCAL_RANK", rank)
    ahead.compile_ahead(launches(count))
    assert [len(share) for share, _ in shares] == sizes
    assert {constant for share, _ in shares for *_, (constant,), _ in share} == set(range(count if sizes else 0))


def test_a_share_that_was_compiled_is_not_compiled_again(shares):
    ahead.compile_ahead(launches(2))
    ((_, mark),) = shares
    assert mark.parent == Path(os.environ["TRITON_CACHE_DIR"])
    ahead.compile_ahead(launches(2))
    mark.touch()
    ahead.compile_ahead(launches(2))
    assert len(shares) == 2


def test_a_run_goes_on_where_no_process_can_begin(monkeypatch, shares):
    monkeypatch.setattr(ahead, "start_call", begun := mock.Mock(side_effect=OSError))
    ahead.compile_ahead(launches(2))
    assert begun.called
