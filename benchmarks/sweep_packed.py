"""Times candidate block shapes of the products that read packed weights: where the entries of the table in
kernels/triton/config.py come from.

    python benchmarks/sweep_packed.py --out DIR [--shape H,I,E,K] [--tokens T ...]

As sweep_triton.py; a graph goes through the weights of several layers, which no cache holds together.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import subprocess
import sys

import provenance
import torch
from measuring import graph_of
from shapes import Shape
from sweep_triton import NothingKept, interleaved_us
from triton.runtime import JITFunction

from sonicmoe_hf.comparing import relative_error
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.quantized import FORMATS, quantize
from sonicmoe_hf.kernels.triton import gemm_packed
from sonicmoe_hf.kernels.triton import launch as launching
from sonicmoe_hf.kernels.triton.config import Blocks

CANDIDATES = [
    *itertools.starmap(Blocks, itertools.product((64,), (128, 256), (4,), (1, 2, 3, 4))),
    Blocks(64, 512, 4, 1),
    Blocks(64, 512, 4, 2),
    Blocks(128, 128, 4, 2),
    Blocks(128, 256, 4, 1),
    Blocks(128, 128, 8, 2),
    Blocks(128, 256, 8, 2),
    Blocks(32, 256, 2, 2),
    Blocks(32, 256, 4, 2),
]
LAYERS, SHARES = 8, 15


def use(candidate):
    gemm_packed.blocks_for = lambda *_: candidate


def experiments(shape: Shape, weights):
    """(name, call) of both products in each format; weights: format -> [(gate_up, down) of a layer]."""
    T, H, I, E, K = shape
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(T * K, I, device="cuda", dtype=torch.bfloat16)
    rows = kernels.dispatch(torch.rand(T, E, device="cuda").topk(K, dim=-1).indices, None, T, E, False)
    for name, layers in weights.items():
        for product, place, call in (
            ("up", 0, lambda weight: kernels.up(x, weight, None, rows, Activation(), False, False, True)[1]),
            ("down", 1, lambda weight: kernels.down(a, weight, None, rows)),
        ):
            operands = [layer[place] for layer in layers]
            yield f"{product} {name}", lambda call=call, operands=operands: [call(weight) for weight in operands][-1]


def packed_weights(shape: Shape, layers):
    _, H, I, E, _ = shape
    found = {}
    for name in FORMATS:
        pair = [quantize(torch.randn(E, *size, device="cuda"), name) for size in ((2 * I, H), (H, I))]
        found[name] = [
            [PackedOperand(*(None if p is None else p.clone() for p in packed), name) for packed in pair]
            for _ in range(layers)
        ]
    return found


def compile_share(shapes, share):
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
    launching._COMPILED = NothingKept()
    weights = packed_weights(shapes[0]._replace(E=1), 1)
    for shape in shapes:
        jobs = itertools.product(experiments(shape, weights), CANDIDATES)
        for i, ((name, call), candidate) in enumerate(jobs):
            if i % SHARES == share:
                use(candidate)
                try:
                    call()
                except Exception as error:  # a candidate may ask for more than the GPU has
                    print("not compiled", name, candidate, str(error)[:100], flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--shape", default="2048,768,128,8")
    parser.add_argument("--tokens", action="append", type=int)
    parser.add_argument("--share", type=int)
    options = parser.parse_args()
    sizes = map(int, options.shape.split(","))
    shapes = [Shape(tokens, *rest) for rest in [tuple(sizes)] for tokens in options.tokens or (1, 8, 64, 256)]
    torch.manual_seed(0)
    if options.share is not None:
        return compile_share([shapes[0], shapes[-1]], options.share)
    workers = [subprocess.Popen([sys.executable, *sys.argv, "--share", str(i)]) for i in range(SHARES)]
    for worker in workers:
        worker.wait()
    print("compiled", flush=True)
    weights = packed_weights(shapes[0], LAYERS)
    with open(os.path.join(options.out, "sweep_packed.csv"), "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["shape", "kernel", "blocks", "us", "difference", *provenance.columns()])
        for shape in shapes:
            for name, call in experiments(shape, weights):
                first, found = None, []
                for candidate in CANDIDATES:
                    use(candidate)
                    try:
                        result = call()
                        first = result if first is None else first
                        found.append((candidate, relative_error(result, first), graph_of(call)))
                    except Exception as error:  # as in compile_share
                        print("failed", name, candidate, str(error)[:80])
                lines = []
                for us, (candidate, difference, _) in zip(interleaved_us([f[-1] for f in found]), found):
                    us /= LAYERS
                    text = " ".join(map(str, candidate[:4]))
                    table.writerow(
                        [shape, name, text, f"{us:.2f}", f"{difference:.1e}", *provenance.columns().values()]
                    )
                    wrong = "" if difference < 1e-2 else f" DIFFERS {difference:.1e}"
                    lines.append((us, f"{text}: {us:.1f}{wrong}"))
                print(shape, name, "us", " | ".join(text for _, text in sorted(lines)), flush=True)


if __name__ == "__main__":
    main()
