"""Compiles the Hopper kernels for sm_90a and prints "name|stack N|local N|wgmma N|waits N|code N" a line; needs no GPU.

    python compile_hopper.py          REPRESENTATIVE: every class of kernel, storage order and kind of tile
    python compile_hopper.py NAME ...  these
    python compile_hopper.py --all    every entry of the table in kernels/hopper/config.py, every other option once

stack: bytes of it. local: loads and stores of spilled registers. wgmma: how many there are. waits: how often groups of
them are waited for; as often as there are wgmmas where ptxas has serialised them. code: a checksum of the instructions,
the same in two trees where their machine code is. Run with CUTE_DSL_KEEP=cubin CUTE_DSL_NO_CACHE=1 CUTE_DSL_DUMP_DIR=(an
empty folder).
"""

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import torch
import triton

from sonicmoe_hf.kernels.hopper import compiled
from sonicmoe_hf.kernels.hopper.config import TABLE, TALL, WIDE, PackedKind, gemm_down_tiles, tile
from sonicmoe_hf.kernels.interface import ACTIVATIONS, Activation

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, FP16 = torch.bfloat16, torch.float16
SWIGLU = Activation()


def up(
    H=2048,
    I=768,
    *,
    transposed=False,
    bias=False,
    want=(True, True),
    act=SWIGLU,
    interleaved=False,
    dtype=BF16,
    rank=0,
):
    return "gemm_up", (
        dtype,
        H,
        I,
        not transposed,
        bias,
        *want,
        act,
        interleaved,
        rank,
        tile("gemm_up", act.width(I), dtype),
    )


def down(N=2048, K=768, *, contiguous=True, bias=False, dtype=BF16, chosen=None, rank=0):
    return "gemm_down", (dtype, N, K, contiguous, bias, rank, chosen or gemm_down_tiles(N, K, dtype)[0])


def down_backward(
    H=2048, I=768, *, transposed=False, want=(True, True, True), act=SWIGLU, interleaved=False, dtype=BF16, rank=0
):
    return "gemm_down_backward", (
        dtype,
        H,
        I,
        transposed,
        *want,
        act,
        interleaved,
        rank,
        tile("gemm_down_backward", I, dtype),
    )


def wgrad(M=768, N=2048, *, contiguous=True, dtype=BF16):
    return "gemm_wgrad", (dtype, M, N, contiguous, tile("gemm_wgrad", N))


def fp8_up(H=2048, I=768, *, want=(True, True, True), act=SWIGLU, rank=0):
    return "gemm_fp8_up", (H, I, *want, act, rank)


def fp8_down(H=2048, I=768, *, rank=0):
    return "gemm_fp8_down", (H, I, rank)


def fp8_down_backward(H=2048, I=768, *, want=(True, True, True, True), act=SWIGLU, rank=0):
    """Compile gemm_fp8_backward; with an adapter of rank 16 six values are spilled."""
    return "gemm_fp8_down_backward", (H, I, *want, act, rank)


FROZEN_8 = False, False, True, True  # what is wanted without adapters
CASES = {
    "fp8 down_backward, odd sizes": fp8_down_backward(336, 144),
    "fp8 down_backward, frozen experts": fp8_down_backward(want=FROZEN_8),
    "fp8 up, odd sizes": fp8_up(336, 144),
    "fp8 up, without a": fp8_up(want=(True, False, False)),
    "fp8 up, without h, clamped": fp8_up(want=(False, False, True), act=Activation("clamped_swiglu")),
    "fp8 up, rank 16": fp8_up(rank=16),
    "fp8 up, odd sizes, rank 16": fp8_up(336, 144, rank=16),
    "fp8 up, rank 104": fp8_up(rank=104),
    "fp8 down, odd sizes": fp8_down(336, 144),
    "fp8 down, rank 104": fp8_down(rank=104),
    "down, bias": down(bias=True),
    "down, transposed weight": down(K=1536, contiguous=False),
    "down, whole tiles": down(1536, 256),
    "down, transposed weight, whole tiles, bias": down(1536, 512, contiguous=False, bias=True),
    "down, fp16, odd sizes": down(264, 200, dtype=FP16),
    "wide down, transposed weight": down(K=1536, contiguous=False, chosen=WIDE),
    "wide down, fp16, bias": down(256, 1608, bias=True, dtype=FP16, chosen=WIDE),
    "tall down, bias": down(bias=True, chosen=TALL),
    "tall down, transposed weight, fp16": down(264, 656, contiguous=False, dtype=FP16, chosen=TALL),
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
    "wgrad, stored across, many rows of tiles": wgrad(3088, 2048, contiguous=False),
    "wgrad, fp16, odd sizes": wgrad(264, 200, dtype=FP16),
    "wgrad, whole tiles": wgrad(512, 1536),
}
for rank in (8, 16, 64, 104, 256):
    CASES |= {
        f"down, rank {rank}": down(rank=rank),
        f"down, transposed weight, rank {rank}": down(K=1536, contiguous=False, rank=rank),
        f"wide down, rank {rank}": down(K=1536, rank=rank, chosen=WIDE),
        f"tall down, transposed weight, rank {rank}": down(264, 656, contiguous=False, rank=rank, chosen=TALL),
        f"up, rank {rank}": up(rank=rank),
        f"up, interleaved, bias, transposed, rank {rank}": up(
            2880, 2880, transposed=True, bias=True, act=Activation("clamped_swiglu"), interleaved=True, rank=rank
        ),
        f"down_backward, rank {rank}": down_backward(rank=rank),
        f"down_backward, transposed, rank {rank}": down_backward(2880, 2880, transposed=True, rank=rank),
    }
CASES["up, interleaved, bias, odd sizes, rank 16"] = up(264, 200, bias=True, interleaved=True, rank=16)
for name in sorted({*ACTIVATIONS} - {"swiglu", "clamped_swiglu"}):  # which cases above have
    CASES[f"up, {name}"] = up(act=Activation(name))
    CASES[f"down_backward, {name}"] = down_backward(act=Activation(name))
RELU2 = Activation("relu2")
CASES |= {
    "up, relu2, bias, transposed, odd sizes": up(264, 200, transposed=True, bias=True, act=RELU2),
    "up, relu2, fp16, without h": up(dtype=FP16, act=RELU2, want=(False, True)),
    "up, relu2, without a": up(act=RELU2, want=(True, False)),
    "up, relu2, bias, rank 64": up(2688, 1856, bias=True, act=RELU2, rank=64),
    "down_backward, relu2, odd sizes": down_backward(264, 328, act=RELU2),
    "down_backward, relu2, fp16, transposed": down_backward(transposed=True, dtype=FP16, act=RELU2),
    "down_backward, relu2, rank 64": down_backward(2688, 1856, act=RELU2, rank=64),
}


INT4, NF4, MXFP4 = PackedKind("int4", "bfloat16", 32), PackedKind("nf4", "uint8", 64), PackedKind("mxfp4", "uint8", 32)
for stored, rank in ((INT4, 16), (NF4, 0), (NF4, 16), (MXFP4, 16)):
    CASES |= {
        f"up, {stored.format}, rank {rank}": up(dtype=stored, rank=rank),
        f"down, {stored.format}, rank {rank}": down(dtype=stored, rank=rank),
        f"down, {stored.format} read across, rank {rank}": down(K=1536, contiguous=False, dtype=stored, rank=rank),
        f"down_backward, {stored.format}, rank {rank}": down_backward(dtype=stored, rank=rank),
    }
CLAMPED = Activation("clamped_swiglu")
CASES |= {
    "up, int4 in fp16, rank 16": up(dtype=PackedKind("int4", "float16", 128), rank=16),
    "up, uint4, rank 16": up(dtype=PackedKind("uint4", "bfloat16", 128), rank=16),
    "down_backward, uint4, rank 16": down_backward(dtype=PackedKind("uint4", "bfloat16", 128), rank=16),
    "up, mxfp4, interleaved, bias, rank 16": up(
        2880, 2880, bias=True, act=CLAMPED, interleaved=True, dtype=MXFP4, rank=16
    ),
    "down, mxfp4, bias, rank 16": down(2880, 2880, bias=True, dtype=MXFP4, rank=16),
    "down_backward, mxfp4, interleaved, rank 16": down_backward(
        2880, 2880, act=CLAMPED, interleaved=True, dtype=MXFP4, rank=16
    ),
    "up, nf4, relu2": up(act=RELU2, dtype=NF4),
    "down_backward, nf4, relu2": down_backward(act=RELU2, dtype=NF4),
}
for function in (up, down, down_backward, wgrad):
    kernel, parameters = function()
    for chosen in TABLE[kernel]:
        CASES[f"{kernel}, {chosen}"] = kernel, (*parameters[:-1], chosen)
REPRESENTATIVE = (
    "down, fp16, odd sizes",
    "wide down, fp16, bias",
    "tall down, transposed weight, rank 104",
    "up, fp16, odd sizes",
    "up, interleaved, bias, transposed",
    "fp8 up, odd sizes, rank 16",
    "fp8 down, rank 104",
    "fp8 down_backward, odd sizes",
    "fp8 down_backward, frozen experts",
    "down_backward, fp16, odd sizes",
    "down_backward, interleaved",
    "down_backward, transposed, rank 104",
    "up, relu2, bias, rank 64",
    "down_backward, relu2, odd sizes",
    "wgrad, stored across, many rows of tiles",
    "gemm_wgrad, 128x4",
    "up, nf4, rank 16",
    "down_backward, int4, rank 16",
)


def main(names):
    dump = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for name in names:
        kernel, parameters = CASES[name]
        getattr(compiled, kernel).__wrapped__.__wrapped__(*parameters)  # past both caches
        (cubin,) = dump.glob("*.cubin")
        shown = subprocess.run([CUOBJDUMP, "-res-usage", "-sass", cubin], capture_output=True, text=True, check=True)
        sass = shown.stdout
        stack = max(int(n) for n in re.findall(r"STACK:(\d+)", sass + shown.stderr))
        local, wgmma, waits = (
            len(re.findall(rf"\b{op}\b", sass)) for op in ("(LDL|STL)", "[HQ]GMMA", r"WARPGROUP\.DEPBAR")
        )
        # without addresses and encodings
        instructions = (re.sub(r"/\*.*?\*/", "", line).strip() for line in sass.splitlines())
        code = zlib.crc32("\n".join(line for line in instructions if line.endswith(";")).encode())
        cubin.unlink()
        print(f"{name}|stack {stack}|local {local}|wgmma {wgmma}|waits {waits}|code {code}", flush=True)


if __name__ == "__main__":
    main(CASES if "--all" in sys.argv else sys.argv[1:] or REPRESENTATIVE)
