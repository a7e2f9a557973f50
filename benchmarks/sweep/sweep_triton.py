"""Times candidate block shapes of the Triton kernels, kernel by kernel: where the table in kernels/triton/config.py
comes from.

    python -m benchmarks.sweep.sweep_triton [--csv FILE] [--shape T,H,I,E,K ...] [--kernel up ...]

bf16, swiglu, random data and routing (candidates.py). Writes sweep_triton.csv.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch

from benchmarks.common.command import Command
from benchmarks.common.shapes import SHAPES, Shape, problem
from benchmarks.common.table import Rows
from benchmarks.common.timing import release
from benchmarks.sweep.candidates import KEYS, add_share, add_timed, compile_in_processes, compile_share, products
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.triton import config, gemm_common, gemm_down_backward, gemm_wgrad
from sonicmoe_hf.kernels.triton.config import Blocks, GradientBlocks


def _both(*candidates):
    """List every candidate with tensor descriptors and without."""
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
    """Make the table answer `candidate` from now on, and cut rows into tiles of `tile`."""
    dispatch = import_module("sonicmoe_hf.kernels.triton.dispatch")  # the package's `dispatch` is the function
    for module in (config, dispatch, gemm_common, gemm_down_backward):
        module.tile_rows = lambda num_pairs, num_experts: tile
    for module in (gemm_common, gemm_wgrad):
        module.blocks_for = lambda *_: candidate


def jobs(shape: Shape, wanted, inputs):
    """Make kernel -> ([(name, what has the candidate used, call)], FLOP)."""
    x, _, _, expert, weight, _ = inputs
    T, H, _, E, K = shape
    by_kernel: dict[str, tuple[list, float]] = {}

    def add(kernel, tile, candidates, flop, call):
        for candidate in candidates if kernel in wanted else ():
            name = f"{tile}:{'' if candidate is None else ' '.join(map(str, candidate))}"
            by_kernel.setdefault(kernel, ([], flop))[0].append((name, partial(use, tile, candidate), call))

    for tile in (64, 128) if T * K <= 512 * E else (128,):
        use(tile, None)
        rows = kernels.dispatch(expert, None, T, E, True)
        calls = {name: (flop, partial(call, kernels)) for name, (flop, call) in products(shape, inputs, rows).items()}
        for kernel, candidates in CANDIDATES[tile].items():
            add(kernel, tile, candidates, *calls[kernel])
    for kernel in ("gate_up_gradient", "down_gradient"):
        add(kernel, tile, GRADIENTS, *calls[kernel])
    y, weight = torch.randn(T * K, H, device=x.device, dtype=x.dtype), weight.float().reshape(-1)
    add("combine", tile, [None], 0, lambda: kernels.combine(y, weight, rows, T))
    add("dispatch", tile, [None], 0, lambda: kernels.dispatch(expert, None, T, E, False)[:5])
    return by_kernel


def unwritten(shape: Shape):
    """Make a problem without values."""
    T, H, I, E, K = shape
    inputs = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in ((T, H), (E, 2 * I, H), (E, H, I))]
    return [*inputs, torch.zeros(T, K, device="cuda", dtype=torch.int64), torch.empty(T, K, device="cuda"), inputs[0]]


def main():
    parser = Command(__doc__, "sweep_triton.csv", shapes=SHAPES)
    parser.add_argument("--kernel", action="append")
    add_share(parser)
    options = parser.parse_args()
    shapes = list(options.shapes.values())
    wanted = options.kernel or [*CANDIDATES[128], "gate_up_gradient", "down_gradient", "combine", "dispatch"]
    if options.share is not None:
        every = (jobs(shape, wanted, unwritten(shape)) for shape in shapes)
        return compile_share(options.share, (job for each in every for group, _ in each.values() for job in group))
    compile_in_processes(__spec__.name)
    table = Rows(options.csv, KEYS)
    for shape in shapes:
        for name, (group, flop) in jobs(shape, wanted, problem(shape)).items():
            add_timed(table, shape, name, "blocks", group, flop)
        table.write()
        release()


if __name__ == "__main__":
    main()
