"""Power and clock of the GPU while each Hopper GEMM repeats, and the driver's reason for holding the clock.

    python -m benchmarks.layer.power [--shape T,H,I,E,K ...]     # writes results/power.csv

Every kernel repeats for SECONDS without a pause; nvidia-smi samples the GPU beside it, and the first half of the samples
is left out. Nothing of the GPU's settings is changed.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from functools import partial

import torch

from benchmarks.common.command import Command
from benchmarks.common.shapes import SHAPES, Shape, problem
from benchmarks.common.table import Rows
from benchmarks.sweep.candidates import products
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.dispatch import dispatch

SECONDS = 1.0
GEMMS = {name: name for name in ("up", "down", "down_backward", "up_backward_input")}
GEMMS |= {"dW1": "gate_up_gradient", "dW2": "down_gradient"}
QUERY = {  # column: what nvidia-smi calls it
    "watts": "power.draw.instant",
    "clock_MHz": "clocks.sm",
    "power_cap": "clocks_event_reasons.sw_power_cap",
    "hw_slowdown": "clocks_event_reasons.hw_slowdown",
    "thermal_slowdown": "clocks_event_reasons.sw_thermal_slowdown",
    "limit_watts": "enforced.power.limit",
    "max_clock_MHz": "clocks.max.sm",
}


def kernels_of(shape: Shape) -> dict:
    """List the six GEMMs of a layer as calls without arguments."""
    hopper, inputs = backends.load("hopper"), problem(shape)
    rows = dispatch(inputs[3], shape.T, shape.E, backend="hopper")
    calls = products(shape, inputs, rows)
    return {kernel: partial(calls[name][1], hopper) for kernel, name in GEMMS.items()}


def sample_power(call) -> tuple[float, list[list[str]]]:
    """Repeat `call` for SECONDS. Returns microseconds a call, and nvidia-smi's samples."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    options = f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader,nounits", "--loop-ms=50"
    command = ["nvidia-smi", *options, f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sampler:
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            for _ in range(10):
                call()
            torch.cuda.synchronize()
            calls += 10
        seconds = time.perf_counter() - began
        sampler.terminate()
        lines = sampler.stdout.read().splitlines()
    samples = [line.split(", ") for line in lines if line.count(", ") == len(QUERY) - 1]
    return 1e6 * seconds / calls, samples[len(samples) // 2 :]


def figure(values: tuple[str, ...]) -> float:
    """Compute the median, or the share of the samples in which the driver names a reason."""
    if set(values) <= {"Active", "Not Active"}:
        return statistics.fmean(value == "Active" for value in values)
    return statistics.median(map(float, values))


def main() -> None:
    parser = Command(__doc__, "power.csv", shapes=SHAPES)
    options = parser.parse_args()
    table = Rows(options.csv)
    for shape in options.shapes.values():
        for name, call in kernels_of(shape).items():
            microseconds, samples = sample_power(call)
            if not samples:
                raise SystemExit("nvidia-smi gave no samples; run it by hand with the query of this file")
            figures = dict(zip(QUERY, map(figure, zip(*samples))))
            table.add(shape=shape, kernel=name, microseconds=microseconds, **figures)
    table.write()


if __name__ == "__main__":
    main()
