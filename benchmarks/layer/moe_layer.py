"""One MoE layer on a GPU: time, memory and error of every contender, in one interleaved run.

    python -m benchmarks.layer.moe_layer [--shape T,H,I,E,K ...] [--contender NAME ...]
        [--upstream] [--out benchmarks/results]
    python -m benchmarks.layer.moe_layer --shape Nemotron-3-Nano-30B-A3B --out /tmp/nemotron
    python -m benchmarks.layer.moe_layer --device cpu --shape 16,2688,1856,2,1,relu2 --out /tmp/tried

Without --shape: the shapes of shapes.py. bf16, random data and routing; SwiGLU, or squared ReLU without a gate where a
shape ends in "relu2". Writes moe_layer.csv. --device cpu checks the script; its times mean nothing.
--upstream adds Transformers' sonicmoe, which tunes for minutes at each new shape. Modes: forward (no gradients),
forward+backward (of x, weights, routing weights), frozen (the same without the experts' weights). Host time is that of a
layer alone (host_ms) and of one in a stack of layers (stacked_host_ms).
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.common.contenders import BOUND, CONTENDERS, EAGER, ON_CPU, available
from benchmarks.common.measuring import captured, relative_errors
from benchmarks.common.paths import RESULTS
from benchmarks.common.shapes import LARGE, add_shapes, chosen_shapes, floor_seconds, problem
from benchmarks.common.table import Table
from sonicmoe_hf.kernels.triton.config import tile_rows

MODES = ("forward", "forward+backward", "frozen")
NAMES = ("x", "gate_up", "down", "weight")


class Step:
    """One contender on one problem: a call is one forward, or one forward and backward."""

    adapters: ClassVar = {}

    def __init__(self, layer, inputs, mode):
        x, gate_up, down, expert, weight, self.dout = inputs
        frozen = mode == "frozen"
        self.mode, self.layer, self.expert = mode, layer, expert
        self.leaves = [x, gate_up, down, weight]
        self.wanted = [] if mode == "forward" else [x, weight] if frozen else self.leaves
        self.gradients = ()

    def forward(self):
        for leaf in self.leaves:
            leaf.requires_grad_(any(leaf is wanted for wanted in self.wanted))
        with torch.set_grad_enabled(bool(self.wanted)):
            x, gate_up, down, weight = self.leaves
            return self.layer(x, gate_up, down, self.expert, weight)

    def __call__(self):
        out = self.forward()
        if self.wanted:
            self.gradients = torch.autograd.grad(out, self.wanted, self.dout, allow_unused=True)
        return out

    def results(self):
        """out, and the gradient of every input under its name with a d before it."""
        out = self().detach()
        return {"out": out, **{f"d{name}": gradient for name, gradient in zip(NAMES, self.gradients)}}


def memory(step):
    """MB that forward leaves for backward (its output not counted), and the most a step takes beyond its inputs."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    out = step.forward()
    held = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    del out
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    step.gradients = ()
    return {"held_MB": held / 1e6, "peak_MB": peak / 1e6}


def first_step(step):
    """Seconds of a contender's first forward and backward at this size, what it compiles, loads and tunes included, and
    the most memory that took beyond its inputs, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    step.gradients = ()
    return {"first_step_s": seconds, "first_peak_MB": (torch.cuda.max_memory_allocated() - before) / 1e6}


def interleaved_times(calls, rounds):
    """name -> (device milliseconds, host milliseconds) of each round. Every round runs every call once, in an order of
    its own, since the clock that a GPU at its power cap gives a call depends on what ran before."""
    times, order, generator = {name: ([], []) for name in calls}, list(calls), random.Random(0)
    for call in calls.values():
        call()
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            call = calls[name]
            if not torch.cuda.is_available():
                began = time.perf_counter()
                call()
                for values in times[name]:
                    values.append(1e3 * (time.perf_counter() - began))
                continue
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began = time.perf_counter()
            start.record()
            call()
            end.record()
            times[name][1].append(1e3 * (time.perf_counter() - began))
            end.synchronize()
            times[name][0].append(start.elapsed_time(end))
    return times


def stacked_host_times(layer, inputs, mode, rounds, depth=4):
    """Host milliseconds a layer of each round, without waiting for the GPU, in a stack of `depth` layers.

    So a model runs: one call of backward, on autograd's thread for the GPU, goes through all layers. A layer alone
    (`host_ms`) also pays for going to that thread and back, and for starting after a pause.
    """
    x, *others, expert, weight, dout = inputs
    frozen, forward_only = mode == "frozen", mode == "forward"
    stack = [[t.detach().requires_grad_(not forward_only and not frozen) for t in others] for _ in range(depth)]
    routings = [weight.detach().requires_grad_(not forward_only) for _ in range(depth)]
    x = x.detach().requires_grad_(not forward_only)
    wanted = [t for t in (x, *routings, *(t for pair in stack for t in pair)) if t.requires_grad]
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.set_grad_enabled(not forward_only):
            out = x
            for (gate_up, down), routing in zip(stack, routings):
                out = layer(out, gate_up, down, expert, routing)
        if wanted:
            torch.autograd.grad(out, wanted, dout, allow_unused=True)
        times.append(1e3 * (time.perf_counter() - began) / depth)
    return times[1:]


def measure(table, config, shape, names, rounds, device):
    inputs, on_gpu = problem(shape, device=device), device == "cuda"
    layers = available(names, shape)
    rows_E = inputs[3].flatten().bincount(minlength=shape.E)
    R, tile = shape.T * shape.K, tile_rows(shape.T * shape.K, shape.E)
    padded = ((rows_E + tile - 1) // tile * tile).sum().item() / R
    for name, layer in layers.items() if on_gpu else ():
        figures = first_step(Step(layer, inputs, "forward+backward"))
        for metric, value in figures.items():
            table.add(config, shape, name, "forward+backward", "eager", metric, [value])
    for mode in MODES:
        add = lambda name, launch, metric, values: table.add(config, shape, name, mode, launch, metric, values)  # noqa: E731, B023
        steps = {name: Step(layer, inputs, mode) for name, layer in layers.items()}
        for name, step in steps.items():
            step()
            step.gradients = ()
            if name != BOUND:
                if mode == "forward+backward":
                    for tensor, error in relative_errors(step, inputs, shape.activation).items():
                        add(name, "eager", f"error_{tensor}", [error])
                    step.gradients = ()
                for metric, value in memory(step).items() if on_gpu else ():
                    add(name, "eager", metric, [value])
            if name == "triton":
                add(name, "eager", "padded_row_factor", [padded])
        floor = 1e3 * floor_seconds(shape, mode)
        in_graphs = on_gpu and shape not in LARGE.values()
        graphs = {name: captured(step) for name, step in steps.items()} if in_graphs else {}
        runs = {"eager": steps, "graph": {name: graph for name, graph in graphs.items() if graph}}
        for launch, calls in runs.items():
            for name, (device, host) in interleaved_times(calls, rounds).items():
                add(name, launch, "ms", device)
                add(name, launch, "host_ms", host)
                add(name, launch, "share_of_floor", [floor / ms for ms in device])
        for name, layer in layers.items():
            # the bound's buffers serve one layer at a time, and a stack of large layers does not fit
            if name != BOUND and shape not in LARGE.values() and on_gpu:
                add(name, "eager", "stacked_host_ms", stacked_host_times(layer, inputs, mode, rounds))
        del steps, graphs, runs, calls
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    show(table, config, shape, layers)


def show(table, config, shape, names):
    """One line a contender; x: how many times as long as ours it takes, forward and backward."""
    floor = 1e3 * floor_seconds(shape, "forward+backward")
    print(f"{config} {shape}   floor {floor:.2f} ms   (forward, forward+backward, frozen; graph; ms)", flush=True)
    ours = table.get(config=config, contender="triton", mode="forward+backward", launch="eager", metric="ms")
    for name in names:
        at = {"config": config, "contender": name, "launch": "eager"}
        times = [table.get(**at, mode=mode, metric="ms") for mode in MODES]
        step = {**at, "mode": "forward+backward"}
        graph = table.get(**{**step, "launch": "graph"}, metric="ms")
        errors = " ".join(f"{table.get(**step, metric=f'error_{t}'):.4f}" for t in ("out", *(f"d{n}" for n in NAMES)))
        print(
            f"  {name:24s} {times[0]:6.2f} {times[1]:6.2f} {times[2]:6.2f}  graph {graph:6.2f}  x{times[1] / ours:.2f}"
            f"  floor {table.get(**step, metric='share_of_floor'):.0%}  host {table.get(**step, metric='host_ms'):.2f}"
            f" stacked {table.get(**step, metric='stacked_host_ms'):.2f}"
            f"  held {table.get(**step, metric='held_MB'):.0f} peak {table.get(**step, metric='peak_MB'):.0f}"
            f" (first {table.get(**step, metric='first_peak_MB'):.0f}) MB"
            f"  first {table.get(**step, metric='first_step_s'):.1f} s  errors {errors}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shapes(parser)
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS))
    parser.add_argument("--upstream", action="store_true", help="also Transformers' sonicmoe, which tunes for minutes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; --device cpu --shape 64,32,16,8,2 checks the script")
    on_gpu = [n for n in CONTENDERS if n != EAGER and (options.upstream or "Transformers" not in n)]
    names = options.contender or (on_gpu if options.device == "cuda" else ON_CPU)
    table = Table()
    for config, shape in chosen_shapes(options, ungated=True).items():
        measure(table, config, shape, names, options.rounds, options.device)
        table.write(options.out / "moe_layer.csv")


if __name__ == "__main__":
    main()
