"""Times candidate block shapes of the Triton kernels, kernel by kernel: where the table in kernels/triton/config.py
comes from.

    python -m benchmarks.sweep.sweep_triton --out DIR [--shape T,H,I,E,K ...] [--kernel up ...]

bf16, swiglu, random data and routing (candidates.py). Writes sweep_triton.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
from functools import partial
from importlib import import_module

import torch

from benchmarks.common.shapes import SHAPES, Shape, problem
from benchmarks.sweep.candidates import ORIGIN, compile_in_processes, compile_share, timed, write
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.kernels.triton import config, gemm_common, gemm_down_backward, gemm_wgrad
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


def jobs(shape: Shape, wanted, inputs):
    """kernel -> ([(name, what has the candidate used, call)], FLOP)."""
    found: dict[str, tuple[list, float]] = {}
    for kernel, tile, candidate, flop, call in experiments(shape, wanted, inputs):
        name = f"{tile}:{'' if candidate is None else ' '.join(map(str, candidate))}"
        found.setdefault(kernel, ([], flop))[0].append((name, partial(use, tile, candidate), call))
    return found


def unwritten(shape: Shape):
    """A problem without values."""
    T, H, I, E, K = shape
    inputs = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in ((T, H), (E, 2 * I, H), (E, H, I))]
    return [*inputs, torch.zeros(T, K, device="cuda", dtype=torch.int64), torch.empty(T, K, device="cuda"), inputs[0]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--shape", action="append")
    parser.add_argument("--kernel", action="append")
    parser.add_argument("--share", type=int)
    options = parser.parse_args()
    shapes = [Shape(*map(int, s.split(","))) for s in options.shape or ()] or list(SHAPES.values())
    wanted = options.kernel or [*CANDIDATES[128], "gate_up_gradient", "down_gradient", "combine", "dispatch"]
    if options.share is not None:
        every = (
            job for shape in shapes for group, _ in jobs(shape, wanted, unwritten(shape)).values() for job in group
        )
        return compile_share(options.share, every)
    compile_in_processes(__spec__.name)
    with open(os.path.join(options.out, "sweep_triton.csv"), "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["shape", "kernel", "blocks", "us", "TFLOP/s", "difference", *ORIGIN])
        for shape in shapes:
            for name, (group, flop) in jobs(shape, wanted, problem(shape)).items():
                write(table, shape, name, timed(group), flop)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
