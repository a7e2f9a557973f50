"""Helpers of several tests of kernels: comparisons, what a GPU is to do or not, scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from benchmarks.common.timing import record_graph
from sonicmoe_hf.tools.comparing import relative_error


def errors(results, expected) -> dict[str, float]:
    """Compute the relative error of every named tensor."""
    return {name: relative_error(results[name], expected[name]) for name in expected}


def same_bits(results, expected) -> bool:
    """Tell whether every named tensor is equal to the expected one, bit by bit but for the sign of zeros."""
    return all(torch.equal(results[name], expected[name]) for name in expected)


def num_launches(call) -> int:
    """Count the kernels that a call launches once they are compiled."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def check_nothing_synchronises(call):
    """Call twice and check the second time, because the first may compile."""
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replay(step):
    """Check that a captured `step` gives the bits of others, by name, when it is replayed."""
    expected = step()
    assert same_bits(step(), expected)
    graph, results = record_graph(step)
    for result in results.values():
        result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(results, expected)


def script_output(script, *arguments, environment=None) -> list[list[str]]:
    """Run a script and return its output's lines that have fields, split at "|"; in a process that does not interpret
    Triton."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=variables | (environment or {}))
    assert result.returncode == 0, result.stderr[-3000:]
    return [line.split("|") for line in result.stdout.splitlines() if "|" in line]
