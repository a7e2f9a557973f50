"""What holds the GPU's clock while each Hopper GEMM repeats: power, clock, and the reason that the driver names.

    python -m benchmarks.layer.power [--shape T,H,I,E,K ...]     # writes results/power.csv

Every kernel repeats for SECONDS without a pause; nvidia-smi samples the GPU beside it, and the first half of the samples
is left out. Nothing of the GPU's settings is changed.
"""

from __future__ import annotations

import statistics
import subprocess
import time

import torch

from benchmarks.common.command import Command
from benchmarks.common.shapes import Shape, add_shapes, chosen_shapes, problem
from benchmarks.common.table import Rows
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.dispatch import dispatch

SECONDS = 1.0
QUERY = ("power.draw.instant", "clocks.sm", "clocks_event_reasons.sw_power_cap", "clocks_event_reasons.hw_slowdown",
         "clocks_event_reasons.sw_thermal_slowdown", "enforced.power.limit", "clocks.max.sm")  # fmt: skip
FIELDS = ("shape", "kernel", "microseconds", "watts", "clock_MHz", "power_cap", "hw_slowdown", "thermal_slowdown",
          "limit_watts", "max_clock_MHz")  # fmt: skip


def kernels_of(shape: Shape) -> dict:
    """The six GEMMs of a layer as calls without arguments."""
    hopper, swiglu = backends.load("hopper"), Activation()
    x, gate_up, down, index, weights, dout = problem(shape)
    rows = dispatch(index, shape.T, shape.E, backend="hopper")
    weight_P = weights.detach().float().reshape(-1)
    x, gate_up, down = x.detach(), gate_up.detach(), down.detach()
    h, a = hopper.up(x, gate_up, None, rows, swiglu, False, want_h=True, want_a=True)
    wanted = {"want_dh": True, "want_a": True, "want_dw": True}
    dh, weighted, _ = hopper.down_backward(dout, down, None, h, weight_P, rows, swiglu, False, **wanted)
    return {
        "up": lambda: hopper.up(x, gate_up, None, rows, swiglu, False, want_h=True, want_a=True),
        "down": lambda: hopper.down(a, down, None, rows),
        "down_backward": lambda: hopper.down_backward(dout, down, None, h, weight_P, rows, swiglu, False, **wanted),
        "up_backward_input": lambda: hopper.up_backward_input(dh, gate_up, rows),
        "dW1": lambda: hopper.gate_up_gradient(dh, x, rows, gate_up),
        "dW2": lambda: hopper.down_gradient(dout, weighted, rows, down),
    }


def sampled(call) -> tuple[float, list[list[str]]]:
    """(microseconds a call, nvidia-smi's samples) of `call` repeated for SECONDS."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(QUERY)}",
        "--format=csv,noheader,nounits",
        "--loop-ms=50",
        f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}",
    ]
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


def main() -> None:
    parser = Command(__doc__, "power.csv")
    add_shapes(parser)
    options = parser.parse_args()
    table = Rows(options.csv)
    for shape in chosen_shapes(options).values():
        for name, call in kernels_of(shape).items():
            microseconds, samples = sampled(call)
            if not samples:
                raise SystemExit("nvidia-smi gave no samples; run it by hand with the query of this file")
            watts, clock = (statistics.median(float(sample[i]) for sample in samples) for i in (0, 1))
            # the share of the samples in which the driver names each reason
            reasons = [statistics.fmean(sample[i] == "Active" for sample in samples) for i in (2, 3, 4)]
            figures = (shape, name, microseconds, watts, clock, *reasons, *samples[-1][5:])
            table.add(**dict(zip(FIELDS, figures)))
    table.write()


if __name__ == "__main__":
    main()
