"""Times candidate block shapes of the Triton kernels, kernel by kernel: where the table in kernels/triton/config.py
comes from.

    python -m benchmarks.sweep.sweep_triton --out DIR [--shape T,H,I,E,K ...] [--kernel up ...]

Compiles in processes of their own first. A kernel's candidates take turns without a pause, so that all of them run at the
clock that the GPU sustains. Every candidate's result is compared with the first's.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from importlib import import_module

import torch
from triton.runtime import JITFunction

from benchmarks.common import provenance
from benchmarks.common.measuring import graph_of, largest_error
from benchmarks.common.shapes import SHAPES, Shape, problem
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.kernels.triton import config, gemm_common, gemm_down_backward, gemm_wgrad
from sonicmoe_hf.kernels.triton import launch as launching
from sonicmoe_hf.kernels.triton.config import Blocks, GradientBlocks


def _both(*candidates):
    """Every candidate with tensor descriptors and without."""
    return [c._replace(descriptors=descriptors) for c in candidates for descriptors in (True, False)]


# row tile -> kernel -> candidates
CANDIDATES = {
    128: {
        "up": [*_both(Blocks(128, 64, 8, 4)), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 3)],
        "down": [*_both(Blocks(256, 64, 8, 4)), Blocks(256, 64, 8, 4, 16), Blocks(128, 64, 4, 3)],
        "up_backward_input": [*_both(Blocks(256, 64, 8, 4)), Blocks(256, 64, 8, 3), Blocks(128, 64, 4, 3)],
        "down_backward": [*_both(Blocks(256, 64, 16, 4, piece=64)), Blocks(256, 64, 16, 4), Blocks(128, 64, 8, 6)],
    },
    64: {
        "up": _both(Blocks(128, 64, 8, 5), Blocks(128, 64, 8, 4)),
        "down": _both(Blocks(256, 64, 8, 5), Blocks(256, 64, 8, 4)),
        "up_backward_input": _both(Blocks(256, 64, 8, 5), Blocks(256, 64, 8, 4)),
        "down_backward": _both(Blocks(256, 64, 16, 5, piece=128), Blocks(256, 64, 8, 4)),
    },
}
GRADIENTS = _both(
    GradientBlocks(128, 256, 64, 8, 5),
    GradientBlocks(128, 256, 64, 8, 7),
    GradientBlocks(128, 128, 64, 8, 5),
    GradientBlocks(128, 128, 32, 4, 5, peel=False),
)


def use(tile, candidate):
    """From now on the table answers `candidate`, and rows are cut into tiles of `tile`."""
    dispatch = import_module("sonicmoe_hf.kernels.triton.dispatch")  # the package's `dispatch` is the function
    for module in (config, dispatch, gemm_common, gemm_down_backward):
        module.tile_rows = lambda num_pairs, num_experts: tile
    for module in (gemm_common, gemm_wgrad):
        module.blocks_for = lambda *_: candidate


def experiments(shape: Shape, wanted, inputs):
    """(kernel, tile, candidate, FLOP, call) for each kernel and candidate."""
    x, gate_up, down, expert, weight, dout = inputs
    T, H, I, E, K = shape
    R, act = T * K, Activation()
    weight = weight.float().reshape(-1)
    h, a = torch.randn(R, 2 * I, device=x.device, dtype=x.dtype), torch.randn(R, I, device=x.device, dtype=x.dtype)
    for tile in (64, 128) if R <= 512 * E else (128,):
        use(tile, None)
        found = kernels.dispatch(expert, None, T, E, True)
        calls = {
            "up": (2 * R * H * 2 * I, lambda r: kernels.up(x, gate_up, None, r, act, False, True, True)),
            "down": (2 * R * H * I, lambda r: kernels.down(a, down, None, r)),
            "up_backward_input": (2 * R * H * 2 * I, lambda r: kernels.up_backward_input(h, gate_up, r)),
            "down_backward": (
                2 * R * H * I,
                lambda r: kernels.down_backward(dout, down, None, h, weight, r, act, False, True, True, True),
            ),
        }
        for kernel, (flop, call) in calls.items():
            for candidate in CANDIDATES[tile][kernel]:
                if kernel in wanted:
                    yield kernel, tile, candidate, flop, lambda call=call, r=found: call(r)
    calls = {
        "gate_up_gradient": (2 * R * H * 2 * I, lambda: kernels.gate_up_gradient(h, x, found, gate_up)),
        "down_gradient": (2 * R * H * I, lambda: kernels.down_gradient(dout, a, found, down)),
        "combine": (0, lambda: kernels.combine(y, weight, found, T)),
        "dispatch": (0, lambda: kernels.dispatch(expert, None, T, E, False)[:5]),
    }
    y = torch.randn(R, H, device=x.device, dtype=x.dtype)
    for kernel, (flop, call) in calls.items():
        for candidate in GRADIENTS if "gradient" in kernel else (None,):
            if kernel in wanted:
                yield kernel, tile, candidate, flop, call


def interleaved_us(replays, rounds=16, warm=4):
    """The median time of each graph, all taking turns."""
    times = [[] for _ in replays]
    for _ in range(rounds):
        for replay, found in zip(replays, times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            found.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * sorted(a.elapsed_time(b) for a, b in found[warm:])[(rounds - warm) // 2] for found in times]


def as_tensors(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


class NothingKept(dict):
    """Every launch is a first one: here the first only compiles."""

    def __setitem__(self, key, value):
        pass


def compile_share(shapes, wanted, share, shares):
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
    launching._COMPILED = NothingKept()
    for shape in shapes:
        T, H, I, E, K = shape
        inputs = [
            torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in ((T, H), (E, 2 * I, H), (E, H, I))
        ]
        inputs += [torch.zeros(T, K, device="cuda", dtype=torch.int64), torch.empty(T, K, device="cuda"), inputs[0]]
        for i, (kernel, tile, candidate, _, call) in enumerate(experiments(shape, wanted, inputs)):
            if i % shares == share:
                use(tile, candidate)
                try:
                    call()
                except (
                    Exception
                ) as error:  # a candidate may ask for more than the GPU has: the sweep goes on without it
                    print("not compiled", kernel, candidate, str(error)[:100], flush=True)


def measure(table, shape, name, group):
    """Write and print the figures of a kernel's candidates."""
    first, found = None, []
    for tile, candidate, flop, call in group:
        use(tile, candidate)
        try:
            results = as_tensors(call())
            first = first or results
            found.append((tile, candidate, flop, largest_error(results, first), graph_of(call)))
        except Exception as error:  # as in compile_share
            print("failed", name, candidate, str(error)[:80])
    lines = []
    for us, (tile, candidate, flop, difference, _) in zip(interleaved_us([f[-1] for f in found]), found):
        text = "" if candidate is None else " ".join(map(str, candidate))
        table.writerow(
            [
                shape,
                name,
                tile,
                text,
                f"{us:.1f}",
                f"{flop / us / 1e6:.0f}",
                f"{difference:.1e}",
                *provenance.columns().values(),
            ]
        )
        wrong = "" if difference < 1e-2 else f" DIFFERS {difference:.1e}"
        lines.append((us, f"{tile}:{text} {us:.0f}us {flop / us / 1e6:.0f}{wrong}"))
    print(shape, name, " | ".join(text for _, text in sorted(lines)[:8]), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--kernel", action="append")
    parser.add_argument("--share", type=int)
    options = parser.parse_args()
    shapes = [Shape(*map(int, s.split(","))) for s in options.shape or ()] or list(SHAPES.values())
    wanted = options.kernel or [*CANDIDATES[128], "gate_up_gradient", "down_gradient", "combine", "dispatch"]
    shares = 14
    if options.share is not None:
        return compile_share(shapes, wanted, options.share, shares)
    workers = [
        subprocess.Popen([sys.executable, "-m", __spec__.name, *sys.argv[1:], "--share", str(i)])
        for i in range(shares)
    ]
    for worker in workers:
        worker.wait()
    print("compiled", flush=True)
    with open(os.path.join(options.out, "sweep.csv"), "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["shape", "kernel", "row_tile", "blocks", "us", "TFLOP/s", "difference", *provenance.columns()])
        for shape in shapes:
            inputs, groups = problem(shape), {}
            for name, *rest in experiments(shape, wanted, inputs):
                groups.setdefault(name, []).append(rest)
            for name, group in groups.items():
                measure(table, shape, name, group)
            del inputs, groups
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
