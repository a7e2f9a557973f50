"""Compiles the Hopper kernels for sm_90a and prints "name|stack N|local N|wgmma N|waits N|steps N" a line; needs no GPU.

Every entry of the table in kernels/hopper/configs.py in bf16 with swiglu, and every other option once. steps: how many
wgmma instructions there must be. waits: how often groups of them are waited for; at every one where the compiler has
serialised them. Run with CUTE_DSL_KEEP=cubin CUTE_DSL_DUMP_DIR=(an empty folder).
"""

import os
import re
import subprocess
from pathlib import Path

import torch
import triton

from sonicmoe_hf.kernels.hopper import compiled
from sonicmoe_hf.kernels.hopper.configs import MOST_COLUMNS, TABLE, TALL, WIDE, product_tiles, tile
from sonicmoe_hf.kernels.interface import ACTIVATIONS, Activation

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, FP16 = torch.bfloat16, torch.float16
SWIGLU = Activation()


def up(H=2048, I=768, *, transposed=False, bias=False, want=(True, True), act=SWIGLU, interleaved=False, dtype=BF16):
    return "up", (dtype, H, I, not transposed, bias, *want, act, interleaved, tile("up", 2 * I))


def product(N=2048, K=768, *, contiguous=True, bias=False, dtype=BF16, chosen=None):
    return "product", (dtype, N, K, contiguous, bias, chosen or product_tiles(N, K)[0])


def down_backward(
    H=2048, I=768, *, transposed=False, want=(True, True, True), act=SWIGLU, interleaved=False, dtype=BF16
):
    return "down_backward", (dtype, H, I, transposed, *want, act, interleaved, tile("down_backward", I))


def gradient(M=768, N=2048, *, contiguous=True, dtype=BF16):
    return "gradient", (dtype, M, N, contiguous, tile("gradient", N))


CASES = {
    "product, bias": product(bias=True),
    "product, transposed weight": product(K=1536, contiguous=False),
    "product, whole tiles": product(1536, 256),
    "product, transposed weight, whole tiles, bias": product(1536, 512, contiguous=False, bias=True),
    "product, fp16, odd sizes": product(264, 200, dtype=FP16),
    "wide product, transposed weight": product(K=1536, contiguous=False, chosen=WIDE),
    "wide product, fp16, bias": product(256, 1608, bias=True, dtype=FP16, chosen=WIDE),
    "tall product, bias": product(bias=True, chosen=TALL),
    "tall product, transposed weight, fp16": product(264, 656, contiguous=False, dtype=FP16, chosen=TALL),
    "up, bias, transposed": up(2880, 2880, transposed=True, bias=True),
    "up, without h": up(want=(False, True)),
    "up, without a": up(want=(True, False)),
    "up, fp16, odd sizes": up(264, 200, dtype=FP16),
    "up, interleaved": up(interleaved=True),
    "up, interleaved, bias, transposed": up(
        2880, 2880, transposed=True, bias=True, act=Activation("clamped_swiglu"), interleaved=True
    ),
    "down_backward, transposed": down_backward(2880, 2880, transposed=True),
    "down_backward, frozen experts": down_backward(want=(True, False, True)),
    "down_backward, frozen router": down_backward(want=(True, True, False)),
    "down_backward, fp16, odd sizes": down_backward(264, 328, dtype=FP16),
    "down_backward, interleaved": down_backward(interleaved=True),
    "down_backward, interleaved, transposed": down_backward(
        2880, 2880, transposed=True, act=Activation("clamped_swiglu"), interleaved=True
    ),
    "gradient, stored across, many rows of tiles": gradient(3088, 2048, contiguous=False),
    "gradient, fp16, odd sizes": gradient(264, 200, dtype=FP16),
    "gradient, whole tiles": gradient(512, 1536),
}
for name in sorted({*ACTIVATIONS} - {"swiglu", "clamped_swiglu"}):  # which cases above have
    CASES[f"up, {name}"] = up(act=Activation(name))
    CASES[f"down_backward, {name}"] = down_backward(act=Activation(name))
for function in (up, product, down_backward, gradient):
    kernel, parameters = function()
    for chosen in TABLE[kernel]:
        CASES[f"{kernel}, {chosen}"] = kernel, (*parameters[:-1], chosen)


def narrower_too(kernel, parameters):
    """2 where the last tile is narrower and so multiplied by instructions of its own, otherwise 1."""
    if kernel == "up":  # of concatenated weights a tile has two halves
        width = 2 * parameters[2] if parameters[-2] else 0
    else:
        width = parameters[1 if kernel == "product" else 2]
    columns = parameters[-1].columns
    if parameters[-1].rows > 128:
        return 1
    return 2 if 0 < width % columns <= columns - 64 else 1


def main():
    dump = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for name, (kernel, parameters) in CASES.items():
        getattr(compiled, kernel).__wrapped__.__wrapped__(*parameters)  # past both caches
        (cubin,) = dump.glob("*.cubin")
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True)
        stack = max(int(n) for n in re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr))
        sass = subprocess.run([CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        local, wgmma, waits = (
            len(re.findall(rf"\b{op}\b", sass)) for op in ("(LDL|STL)", "HGMMA", r"WARPGROUP\.DEPBAR")
        )
        steps = 4  # a stage's depth of 64 in steps of 16
        if kernel == "gradient":
            # two accumulators; their loops over the first stage and over the rest; and an empty group, which the compiler
            # puts after each of the three loops
            steps = (2 * (steps + 1 + 1) + 3) * narrower_too(kernel, parameters)
        else:
            in_turns = kernel == "product" and parameters[-1].columns <= MOST_COLUMNS
            steps *= 3 if in_turns else 1  # tiles of 128 rows, and of 64
            steps += 4 if parameters[-1].rows > 128 else 0  # what goes with a tile of 128 rows
            steps *= narrower_too(kernel, parameters)
        cubin.unlink()
        print(f"{name}|stack {stack}|local {local}|wgmma {wgmma}|waits {waits}|steps {steps}", flush=True)


if __name__ == "__main__":
    main()
