"""Times candidate block shapes of the products that read packed weights: where the entries of the table in
kernels/triton/config.py come from.

    python -m benchmarks.sweep.sweep_packed --out DIR [--shape H,I,E,K] [--tokens T ...]

As sweep_triton.py; a graph goes through the weights of several layers, which no cache holds together.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys

import torch
from triton.runtime import JITFunction

from benchmarks.common import provenance
from benchmarks.common.measuring import graph_of
from benchmarks.common.shapes import Shape
from benchmarks.sweep.sweep_triton import NothingKept, interleaved_us
from sonicmoe_hf.checkpoints.comparing import relative_error
from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation, PackedOperand
from sonicmoe_hf.kernels.quantized import FORMATS, quantize
from sonicmoe_hf.kernels.triton import gemm_packed
from sonicmoe_hf.kernels.triton import launch as launching
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
LAYERS, SHARES = 8, 15


def use(candidate):
    """From now on the table answers `candidate`."""
    gemm_packed.packed_blocks = lambda *size: candidate


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
        sizes = ((2 * I, H), "concatenated"), ((H, I), "whole")
        pair = [quantize(torch.randn(E, *size, device="cuda"), name, order) for size, order in sizes]
        found[name] = [
            [PackedOperand(*(None if p is None else p.clone() for p in packed), name) for packed in pair]
            for _ in range(layers)
        ]
    return found


def others(shape: Shape):
    """Calls of what a layer with bf16 or expanded weights launches besides, to compile."""
    T, H, I, E, K = shape
    x, a, y = (torch.empty(n, m, device="cuda", dtype=torch.bfloat16) for n, m in ((T, H), (T * K, I), (T * K, H)))
    gate_up, down = (torch.empty(E, *size, device="cuda", dtype=torch.bfloat16) for size in ((2 * I, H), (H, I)))
    rows = kernels.dispatch(torch.zeros(T, K, device="cuda", dtype=torch.int64), None, T, E, False)
    yield lambda: kernels.up(x, gate_up, None, rows, Activation(), False, False, True)
    yield lambda: kernels.down(a, down, None, rows)
    yield lambda: kernels.combine(y, torch.empty(T * K, device="cuda"), rows, T)
    for name in FORMATS:
        for size, order in (((2 * I, H), "concatenated"), ((H, I), "whole")):
            yield lambda name=name, size=size, order=order: kernels.dequantize(
                *quantize(torch.zeros(1, *size, device="cuda"), name, order), name, torch.bfloat16, rows
            )


def compile_share(shape, share):
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
    launching._COMPILED = NothingKept()
    weights = packed_weights(shape._replace(E=1), 1)
    jobs = [(call, candidate) for _, call in experiments(shape, weights) for candidate in CANDIDATES]
    jobs += [(call, CANDIDATES[0]) for call in others(shape)]
    for call, candidate in jobs[share::SHARES]:
        use(candidate)
        try:
            call()
        except Exception as error:  # a candidate may ask for more than the GPU has: the sweep goes on without it
            print("not compiled", candidate, str(error)[:100], flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--shape", default="2048,768,128,8")
    parser.add_argument("--tokens", action="append", type=int, help="default 1, 8 and 64")
    parser.add_argument("--share", type=int)
    options = parser.parse_args()
    H, I, E, K = map(int, options.shape.split(","))
    shapes = [Shape(tokens, H, I, E, K) for tokens in options.tokens or (1, 8, 64)]
    torch.manual_seed(0)
    if options.share is not None:
        return compile_share(shapes[0], options.share)
    workers = [
        subprocess.Popen([sys.executable, "-m", __spec__.name, *sys.argv[1:], "--share", str(i)])
        for i in range(SHARES)
    ]
    weights = packed_weights(shapes[0], LAYERS)
    for worker in workers:
        worker.wait()
    print("compiled", flush=True)
    with open(os.path.join(options.out, "sweep_packed.csv"), "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["shape", "kernel", "blocks", "us", "difference", *provenance.columns()])
        for shape in shapes:
            for name, call in experiments(shape, weights):
                measure(table, shape, name, call)


def measure(table, shape, name, call):
    """Write and print the figures of a product's candidates."""
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
    for us, (candidate, difference, _) in zip(interleaved_us([graph for *_, graph in found]), found):
        us /= LAYERS
        text = " ".join(map(str, candidate))
        table.writerow([shape, name, text, f"{us:.2f}", f"{difference:.1e}", *provenance.columns().values()])
        lines.append((us, f"{text}: {us:.1f}" + ("" if difference < 1e-2 else f" DIFFERS {difference:.1e}")))
    print(shape, name, "us:", " | ".join(text for _, text in sorted(lines)), flush=True)


if __name__ == "__main__":
    main()
