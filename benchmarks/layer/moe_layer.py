"""One MoE layer on a GPU: time, memory and error of every contender, in one interleaved run.

    python -m benchmarks.layer.moe_layer [--shape T,H,I,E,K ...] [--contender NAME ...] [--tuned] [--csv FILE]
    python -m benchmarks.layer.moe_layer --shape Nemotron-3-Nano-30B-A3B
    python -m benchmarks.layer.moe_layer --device cpu --shape 16,2688,1856,2,1,relu2 --csv /tmp/moe_layer.csv

Without --shape: the shapes of shapes.py. bf16, random data and routing; SwiGLU, or squared ReLU without a gate where a
shape ends in "relu2". Writes moe_layer.csv. --device cpu checks the script; its times mean nothing.
--tuned adds Transformers' sonicmoe and Liger's experts, which tune for minutes at each new shape. Modes: forward (no
gradients), forward+backward (of x, weights, routing weights), frozen (the same without the experts' weights). Host time
is that of a layer alone (host_ms) and of one in a stack of layers (stacked_host_ms).
"""

from __future__ import annotations

from benchmarks.common.command import Command
from benchmarks.common.contenders import BOUND, CONTENDERS, EAGER, ON_CPU, TUNED, available
from benchmarks.common.measuring import LayerStep, measure_first_step, measure_memory, relative_errors
from benchmarks.common.shapes import LARGE, SHAPES, Shape, problem
from benchmarks.common.table import Table
from benchmarks.common.timing import interleaved_times, make_replays, release

NAMES = ("x", "gate_up", "down", "weight")
DEPTH = 4  # of a stack of layers
WANTED = {"forward": (), "forward+backward": NAMES, "frozen": ("x", "weight")}


def step_of(layer, inputs, mode: str, depth: int = 1) -> LayerStep:
    """Make a contender's step on a problem: of one layer, or of a stack of so many with weights of their own.

    In a stack, as a model runs, one call of backward, on autograd's thread for the GPU, goes through all layers. A layer
    alone also pays for going to that thread and back, and for starting after a pause.
    """
    x, *others, expert, weight, dout = inputs
    x = x.detach().requires_grad_("x" in WANTED[mode])
    stack = [
        {name: t.detach().requires_grad_(name in WANTED[mode]) for name, t in zip(NAMES[1:], (*others, weight))}
        for _ in range(depth)
    ]

    def forward():
        out = x
        for leaves in stack:
            out = layer(out, leaves["gate_up"], leaves["down"], expert, leaves["weight"])
        return out

    leaves = {"x": x} | {f"{name}{n or ''}": leaf for n, each in enumerate(stack) for name, leaf in each.items()}
    return LayerStep(forward, {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}, dout)


def measure(table: Table, config: str, shape: Shape, names, rounds: int, device: str) -> None:
    """Measure the rows of one shape."""
    inputs, on_gpu = problem(shape, device=device), device == "cuda"
    layers = available(names, shape)
    if on_gpu:
        for name, layer in layers.items():
            first = measure_first_step(step_of(layer, inputs, "forward+backward"))
            table.add(config, shape, name, "forward+backward", "eager", first)
    for mode in WANTED:
        steps = {name: step_of(layer, inputs, mode) for name, layer in layers.items()}
        for name, step in steps.items():
            step()
            step.gradients = ()
            if name != BOUND:
                errors = relative_errors(step, inputs, shape.activation) if mode == "forward+backward" else {}
                metrics = {f"error_{tensor}": error for tensor, error in errors.items()}
                table.add(config, shape, name, mode, "eager", metrics | (measure_memory(step) if on_gpu else {}))
        is_large = shape in LARGE.values()
        graphs = make_replays(steps) if on_gpu and not is_large else {}
        for launch, calls in (("eager", steps), ("graph", graphs)):
            for name, (on_device, host, _) in interleaved_times(calls, rounds).items():
                table.add(config, shape, name, mode, launch, {"ms": on_device, "host_ms": host})
        for name, layer in layers.items():
            # the bound's buffers serve one layer at a time, and a stack of large layers does not fit
            if name != BOUND and not is_large and on_gpu:
                stack = {name: step_of(layer, inputs, mode, DEPTH).results}  # which lets go of the gradients
                stacked = [ms / DEPTH for ms in interleaved_times(stack, rounds)[name].issued]
                table.add(config, shape, name, mode, "eager", {"stacked_host_ms": stacked})
        del steps, graphs, calls
        release()


def main():
    parser = Command(__doc__, "moe_layer.csv", "--device cpu --shape 64,32,16,8,2", shapes=SHAPES, ungated=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--tuned", action="store_true", help=f"also those that tune for minutes: {', '.join(TUNED)}")
    options = parser.parse_args()
    on_gpu = [name for name in CONTENDERS if name != EAGER and (options.tuned or name not in TUNED)]
    names = options.contender or (on_gpu if options.device == "cuda" else ON_CPU)
    table = Table(options.csv)
    for config, shape in options.shapes.items():
        measure(table, config, shape, names, options.rounds, options.device)
        table.write()


if __name__ == "__main__":
    main()
