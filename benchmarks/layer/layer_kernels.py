"""Every kernel of one MoE layer's step on a GPU, timed in place by torch's profiler, contenders taking turns.

    python -m benchmarks.layer.layer_kernels [--shape T,H,I,E,K ...] [--contender NAME ...] [--csv FILE]

bf16, SwiGLU, the data of moe_layer.py. The default contenders are the Hopper kernels and Transformers' sonicmoe, whose
six grouped products stand beside ours. Writes layer_kernels.csv, microseconds.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.command import Command
from benchmarks.common.contenders import CONTENDERS, available
from benchmarks.common.measuring import relative_errors
from benchmarks.common.shapes import SHAPES, Shape, problem
from benchmarks.common.table import Table
from benchmarks.layer.moe_layer import step_of

UPSTREAM = "sonicmoe (Transformers)"
MODES = ("forward+backward", "frozen")
MAX_ERROR = 0.02  # of a result in bf16, relative to its norm
# The grouped products of a step, in the order of their launches; upstream's are the same with frozen experts.
PRODUCTS = {
    "hopper": ("up", "down", "down_backward", "up_backward_input", "dW1", "dW2"),
    UPSTREAM: ("up", "down", "down_backward", "dW2", "up_backward_input", "dW1"),
}


def launches(step):
    """List (name, microseconds) of every kernel, copy and fill of one step, in the order in which they ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    on_gpu = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.device_time) for event in sorted(on_gpu, key=lambda event: event.time_range.start)]


def roles(contender, names, mode):
    """Name the role of each kernel: one of the products, or the start of its own name."""
    skipped = ("dW1", "dW2") if (contender, mode) == ("hopper", "frozen") else ()
    wanted = [role for role in PRODUCTS.get(contender, ()) if role not in skipped]
    grouped = [number for number, name in enumerate(names) if "cutlass" in name]
    if len(grouped) != len(wanted):
        print(f"  {contender}, {mode}: {len(grouped)} grouped products, not {len(wanted)}; listed by name", flush=True)
        wanted = grouped = []
    role_of = dict(zip(grouped, wanted))
    return [role_of.get(number, name.split("(")[0][:60]) for number, name in enumerate(names)]


def times_by_role(contender, runs, mode):
    """Yield (role, microseconds in each run) of every launch in its order, and of their sum; `runs` as `launches`
    gives them. Those with other kernels than the first are left out."""
    names = [name for name, _ in runs[0]]
    runs = [run for run in runs if [name for name, _ in run] == names]
    for number, role in enumerate(roles(contender, names, mode)):
        yield role, [run[number][1] for run in runs]
    yield "sum", [sum(time for _, time in run) for run in runs]


def measure(table: Table, config: str, shape: Shape, contenders, rounds: int) -> None:
    """Measure the rows of one shape."""
    inputs = problem(shape)
    layers = available(contenders, shape)
    launched = {}
    for mode in MODES:
        steps = {name: step_of(layer, inputs, mode) for name, layer in layers.items()}
        for name, step in steps.items():
            if mode == "forward+backward":
                error = max(relative_errors(step, inputs, shape.activation).values())
                print(f"  {name}: largest error against fp32 {error:.4f}", flush=True)
                if not error < MAX_ERROR:
                    raise SystemExit(f"{name} computes another layer")
            step()
            step()
        for _ in range(rounds):
            for name, step in steps.items():
                step()  # so that the one after it runs on a GPU as hot as in training
                launched.setdefault((name, mode), []).append(launches(step))
    for (name, mode), runs in launched.items():
        numbered = enumerate(times_by_role(name, runs, mode))
        times = {role if role == "sum" else f"{number:02d} {role}": values for number, (role, values) in numbered}
        table.add(config, shape, name, mode, "eager", times)


def main():
    parser = Command(__doc__, "layer_kernels.csv", shapes=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    options = parser.parse_args()
    table = Table(options.csv)
    for config, shape in options.shapes.items():
        measure(table, config, shape, options.contender or list(PRODUCTS), options.rounds)
        table.write()


if __name__ == "__main__":
    main()
