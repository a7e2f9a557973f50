"""Times candidate block shapes of the products that read packed weights: where the entries of the table in
kernels/triton/config.py come from.

    python -m benchmarks.sweep.sweep_packed [--csv FILE] [--shape H,I,E,K] [--tokens T ...]

A graph goes through the weights of several layers, which no cache holds together (candidates.py). Writes
sweep_packed.csv.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.common.command import Command
from benchmarks.common.shapes import Shape
from benchmarks.common.table import Rows
from benchmarks.sweep.candidates import KEYS, add_share, add_timed, compile_in_processes, compile_share
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.kernels.triton import gemm_packed
from sonicmoe_hf.kernels.triton.config import PackedBlocks

CANDIDATES = [
    PackedBlocks(height, warps, registers)
    for height, warps, registers in (
        (16, 1, None),
        (32, 1, None),
        (32, 2, None),
        (64, 2, None),
        (64, 4, None),
        (128, 4, None),
        (128, 4, 128),
        (128, 8, None),
        (256, 8, 128),
    )
]
LAYERS = 8


def use(candidate):
    """Make the table answer `candidate` from now on."""
    gemm_packed.packed_blocks = lambda *size: candidate


def jobs(shape: Shape, weights):
    """Make product and format -> [(name, what has the candidate used, call)]; weights: format -> [(gate_up, down) of
    a layer]."""
    T, H, I, E, K = shape
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(T * K, I, device="cuda", dtype=torch.bfloat16)
    rows = kernels.dispatch(torch.rand(T, E, device="cuda").topk(K, dim=-1).indices, None, T, E, False)
    products = {
        "up": lambda layer: kernels.up(x, layer[0], None, rows, Activation(), False, False, True)[1],
        "down": lambda layer: kernels.down(a, layer[1], None, rows),
    }

    def through(product, layers):
        return lambda: [product(layer) for layer in layers][-1]

    return {
        f"{product} {name}": [
            (" ".join(map(str, candidate)), partial(use, candidate), through(call, layers)) for candidate in CANDIDATES
        ]
        for name, layers in weights.items()
        for product, call in products.items()
    }


def packed_weights(shape: Shape, layers):
    _, H, I, E, _ = shape
    by_format = {}
    for name in FORMATS:
        sizes = ((2 * I, H), "concatenated"), ((H, I), "whole")
        pair = [FORMATS[name].quantize(torch.randn(E, *size, device="cuda"), order) for size, order in sizes]
        by_format[name] = [
            [PackedOperand(*(None if p is None else p.clone() for p in packed), name) for packed in pair]
            for _ in range(layers)
        ]
    return by_format


def main():
    parser = Command(__doc__, "sweep_packed.csv")
    parser.add_argument("--shape", default="2048,768,128,8", help="H,I,E,K")
    parser.add_argument("--tokens", action="append", type=int, help="default 1, 8 and 64")
    add_share(parser)
    options = parser.parse_args()
    H, I, E, K = map(int, options.shape.split(","))
    shapes = [Shape(tokens, H, I, E, K) for tokens in options.tokens or (1, 8, 64)]
    torch.manual_seed(0)
    if options.share is not None:
        one = packed_weights(shapes[0]._replace(E=1), 1)  # made where nothing is launched
        return compile_share(options.share, (job for group in jobs(shapes[0], one).values() for job in group))
    compile_in_processes(__spec__.name)
    weights = packed_weights(shapes[0], LAYERS)
    table = Rows(options.csv, KEYS)
    for shape in shapes:
        for name, group in jobs(shape, weights).items():
            add_timed(table, shape, name, "blocks", group, calls=LAYERS)
    table.write()


if __name__ == "__main__":
    main()
