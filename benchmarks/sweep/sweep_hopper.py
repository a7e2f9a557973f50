"""Times candidate tiles of the Hopper kernels, kernel by kernel: where the table in kernels/hopper/config.py comes from.

    python -m benchmarks.sweep.sweep_hopper [--out benchmarks/results] [--shape T,H,I,E,K ...] [--kernel up ...]

bf16, swiglu, random data and routing; weights concatenated, and for `up` and `down_backward` interleaved too. The Triton
kernel is timed beside (candidates.py). Writes sweep_hopper.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.common.paths import RESULTS
from benchmarks.common.shapes import Shape, problem
from benchmarks.sweep.candidates import ORIGIN, timed, write
from sonicmoe_hf.cli import warmup
from sonicmoe_hf.kernels import hopper, triton
from sonicmoe_hf.kernels.hopper import cache, compiled
from sonicmoe_hf.kernels.hopper.config import TALL, WIDE, Tile
from sonicmoe_hf.kernels.interface import Activation

PRODUCTS = [Tile(192, 4), Tile(192, 4, static=True), TALL, WIDE, Tile(128, 6)]
GATED = [Tile(256, 3), Tile(128, 5)]
BACKWARD = [Tile(256, 3), Tile(192, 4), Tile(128, 5)]
GRADIENTS = [Tile(192, 3), Tile(128, 4)]
CANDIDATES = {
    "up": GATED,
    "up, interleaved": GATED,
    "down": PRODUCTS,
    "down_backward": BACKWARD,
    "down_backward, interleaved": BACKWARD,
    "up_backward_input": PRODUCTS,
    "gate_up_gradient": GRADIENTS,
    "down_gradient": GRADIENTS,
}
SHAPES = ("24576,1536,256,128,8", "16384,2048,768,128,8", "16384,2048,1024,64,8", "16384,2880,2880,32,4",
          "16384,4096,1024,256,4", "2048,2048,768,128,8", "512,2048,768,128,8")  # fmt: skip


def calls(shape: Shape, inputs):
    """kernel -> (FLOP, call of a backend's function)."""
    x, gate_up, down, expert, weight, dout = inputs
    T, H, I, E, K = shape
    R, act = T * K, Activation()
    weight = weight.float().reshape(-1)
    h, a = torch.randn(R, 2 * I, device=x.device, dtype=x.dtype), torch.randn(R, I, device=x.device, dtype=x.dtype)
    rows = triton.dispatch(expert, None, T, E, True)
    wide, narrow = 2 * R * H * 2 * I, 2 * R * H * I

    def up(interleaved):
        return lambda backend: backend.up(x, gate_up, None, rows, act, interleaved, True, True)

    def down_backward(interleaved):
        return lambda backend: backend.down_backward(
            dout, down, None, h, weight, rows, act, interleaved, True, True, True
        )

    return {
        "up": (wide, up(False)),
        "up, interleaved": (wide, up(True)),
        "down": (narrow, lambda backend: backend.down(a, down, None, rows)),
        "down_backward": (narrow, down_backward(False)),
        "down_backward, interleaved": (narrow, down_backward(True)),
        "up_backward_input": (wide, lambda backend: backend.up_backward_input(h, gate_up, rows)),
        "gate_up_gradient": (wide, lambda backend: backend.gate_up_gradient(h, x, rows, gate_up)),
        "down_gradient": (narrow, lambda backend: backend.down_gradient(dout, a, rows, down)),
    }


def use(tile: Tile):
    """From now on the table answers `tile`."""
    hopper.tile = lambda *_: tile
    hopper.gemm_down_tiles = lambda *_: (tile,) * 3
    hopper.gemm_wgrad_tiles = lambda *_: (tile, tile)


def asked_for(call, tile: Tile):
    """The kernel that a call asks for, compiling and launching nothing; none where Triton's runs in its place."""
    found = []
    kernels = ("gemm_up", "gemm_down", "gemm_down_backward", "gemm_wgrad")
    notes = {name: (lambda *parameters, name=name: found.append((name, parameters))) for name in kernels}
    use(tile)
    with (
        mock.patch.multiple(compiled, **notes),
        mock.patch.object(hopper, "_run_on_its_device"),
        mock.patch.object(cache, "compile_ahead"),
    ):
        call(hopper)
    return found


def compile_all(shapes, wanted):
    """Compile what the candidates ask for. Returns (shape, kernel's name) -> those that ask for a Hopper kernel."""
    kernels, candidates = {}, {}
    for shape in shapes:
        of_shape = calls(shape, problem(shape))
        for name in wanted:
            found = {tile: asked_for(of_shape[name][1], tile) for tile in CANDIDATES[name]}
            kernels |= dict.fromkeys(kernel for asked in found.values() for kernel in asked)
            candidates[shape, name] = [tile for tile, asked in found.items() if asked]
    for _ in warmup.compile_kernels(list(kernels), os.cpu_count()):
        pass
    print(f"{len(kernels)} kernels compiled", flush=True)
    return candidates


def jobs(call, candidates):
    """(name, what has the tile used, call) of each candidate, and of Triton's kernel."""
    for tile in candidates:
        yield str(tile), partial(use, tile), partial(call, hopper)
    yield "triton", lambda: None, partial(call, triton)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given several times")
    parser.add_argument("--kernel", action="append", choices=CANDIDATES)
    options = parser.parse_args()
    shapes = [Shape(*map(int, text.split(","))) for text in options.shape or SHAPES]
    wanted = options.kernel or list(CANDIDATES)
    candidates = compile_all(shapes, wanted)
    with open(options.out / "sweep_hopper.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["shape", "kernel", "tile", "us", "TFLOP/s", "difference", *ORIGIN])
        for shape in shapes:
            of_shape = calls(shape, problem(shape))
            for name in wanted:
                flop, call = of_shape[name]
                write(table, shape, name, timed(jobs(call, candidates[shape, name])), flop)
                file.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
