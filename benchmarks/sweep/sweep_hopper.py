"""Times candidate tiles of the Hopper kernels, kernel by kernel: where the table in kernels/hopper/config.py comes from.

    python -m benchmarks.sweep.sweep_hopper [--csv FILE] [--shape T,H,I,E,K ...] [--kernel up ...]

bf16, swiglu, random data and routing; weights concatenated, and for `up` and `down_backward` interleaved too. The Triton
kernel is timed beside (candidates.py). Writes sweep_hopper.csv.
"""

from __future__ import annotations

import os
from functools import partial
from unittest import mock

from benchmarks.common.command import Command
from benchmarks.common.shapes import problem
from benchmarks.common.table import Rows
from benchmarks.common.timing import release
from benchmarks.sweep.candidates import KEYS, add_timed, products
from sonicmoe_hf.kernels import hopper, triton
from sonicmoe_hf.kernels.hopper import cache, compiled
from sonicmoe_hf.kernels.hopper.config import TALL, WIDE, Tile
from sonicmoe_hf.tools.cli import warmup_kernels

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


def use(tile: Tile):
    """Make the table answer `tile` from now on."""
    hopper.tile = lambda *_: tile
    hopper.gemm_down_tiles = lambda *_: (tile,) * 3
    hopper.gemm_wgrad_tiles = lambda *_: (tile, tile)


def asked_for(call, tile: Tile):
    """Find the kernel that a call asks for, compiling and launching nothing; none where Triton's runs in its place."""
    asked = []
    kernels = ("gemm_up", "gemm_down", "gemm_down_backward", "gemm_wgrad")
    notes = {name: (lambda *parameters, name=name: asked.append((name, parameters))) for name in kernels}
    use(tile)
    with (
        mock.patch.multiple(compiled, **notes),
        mock.patch.object(hopper, "_run_on_its_device"),
        mock.patch.object(cache, "compile_ahead"),
    ):
        call(hopper)
    return asked


def compile_all(shapes, wanted):
    """Compile the kernels that candidates ask for. Returns (shape, kernel's name) -> those that ask for a Hopper
    kernel."""
    kernels, candidates = {}, {}
    for shape in shapes:
        of_shape = products(shape, problem(shape))
        for name in wanted:
            by_tile = {tile: asked_for(of_shape[name][1], tile) for tile in CANDIDATES[name]}
            kernels |= dict.fromkeys(kernel for asked in by_tile.values() for kernel in asked)
            candidates[shape, name] = [tile for tile, asked in by_tile.items() if asked]
    for _ in warmup_kernels.compile_kernels(list(kernels), os.cpu_count()):
        pass
    print(f"{len(kernels)} kernels compiled", flush=True)
    return candidates


def jobs(call, candidates):
    """Yield (name, what has the tile used, call) of each candidate, and of Triton's kernel."""
    for tile in candidates:
        yield str(tile), partial(use, tile), partial(call, hopper)
    yield "triton", lambda: None, partial(call, triton)


def main():
    parser = Command(__doc__, "sweep_hopper.csv", shapes=SHAPES)
    parser.add_argument("--kernel", action="append", choices=CANDIDATES)
    options = parser.parse_args()
    shapes = list(options.shapes.values())
    wanted = options.kernel or list(CANDIDATES)
    candidates = compile_all(shapes, wanted)
    table = Rows(options.csv, KEYS)
    for shape in shapes:
        of_shape = products(shape, problem(shape))
        for name in wanted:
            flop, call = of_shape[name]
            add_timed(table, shape, name, "tile", jobs(call, candidates[shape, name]), flop)
            table.write()
        release()


if __name__ == "__main__":
    main()
