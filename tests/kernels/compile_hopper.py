"""Compiles every Hopper kernel for sm_90a and prints "name|stack N|local N|wgmma N" a line; needs no GPU.

Run with CUTE_DSL_ARCH=sm_90a CUTE_DSL_KEEP=cubin CUTE_DSL_DUMP_DIR=(an empty folder).
"""

import os
import re
import subprocess
from pathlib import Path

import torch
import triton

from sonicmoe_hf.kernels.hopper import COLUMNS, SLOTS, STAGES, compiled

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, TILE = torch.bfloat16, (COLUMNS, STAGES)
BACKWARD = (*TILE, SLOTS)
SWIGLU = ("swiglu", 1.702, 7.0)
OTHERS = [("geglu", 1.702, 7.0), ("geglu_tanh", 1.702, 7.0), ("reglu", 1.702, 7.0), ("clamped_swiglu", 1.702, 7.0)]
KERNELS = {
    "product": (compiled.product, (BF16, 2048, 768, True, False, *TILE)),
    "product, bias": (compiled.product, (BF16, 2048, 768, True, True, *TILE)),
    "product, transposed weight": (compiled.product, (BF16, 2048, 1536, False, False, *TILE)),
    "product, fp16, odd sizes": (compiled.product, (torch.float16, 264, 200, True, False, *TILE)),
    "up": (compiled.up, (BF16, 2048, 768, True, False, True, True, SWIGLU, *TILE)),
    "up, bias, transposed weight": (compiled.up, (BF16, 2880, 2880, False, True, True, True, SWIGLU, *TILE)),
    "up, without h": (compiled.up, (BF16, 2048, 768, True, False, False, True, SWIGLU, *TILE)),
    "up, without a": (compiled.up, (BF16, 2048, 768, True, False, True, False, SWIGLU, *TILE)),
    "up, fp16, odd sizes": (compiled.up, (torch.float16, 264, 200, True, False, True, True, SWIGLU, *TILE)),
    "down_backward": (compiled.down_backward, (BF16, 2048, 768, False, True, True, True, SWIGLU, *BACKWARD)),
    "down_backward, transposed": (
        compiled.down_backward,
        (BF16, 2880, 2880, True, True, True, True, SWIGLU, *BACKWARD),
    ),
    "down_backward, frozen": (compiled.down_backward, (BF16, 2048, 768, False, True, False, True, SWIGLU, *BACKWARD)),
    "down_backward, no router": (
        compiled.down_backward,
        (BF16, 2048, 768, False, True, True, False, SWIGLU, *BACKWARD),
    ),
    "down_backward, fp16": (
        compiled.down_backward,
        (torch.float16, 264, 200, False, True, True, True, SWIGLU, *BACKWARD),
    ),
    "down_backward, narrow experts": (
        compiled.down_backward,
        (BF16, 1536, 256, False, True, True, True, SWIGLU, *BACKWARD),
    ),
    "gradient": (compiled.gradient, (BF16, 2048, 768, True, *TILE)),
    "gradient, stored across": (compiled.gradient, (BF16, 2048, 1536, False, *TILE)),
    "gradient, fp16, odd sizes": (compiled.gradient, (torch.float16, 264, 200, True, *TILE)),
}
for other in OTHERS:
    KERNELS[f"up, {other[0]}"] = (compiled.up, (BF16, 2048, 768, True, False, True, True, other, *TILE))
    KERNELS[f"down_backward, {other[0]}"] = (
        compiled.down_backward,
        (BF16, 2048, 768, False, True, True, True, other, *BACKWARD),
    )


def main():
    dump = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    for name, (cached, parameters) in KERNELS.items():
        cached.__wrapped__.__wrapped__(*parameters)  # past both caches
        (cubin,) = dump.glob("*.cubin")
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True)
        stack = max(int(n) for n in re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr))
        sass = subprocess.run([CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        local, wgmma = len(re.findall(r"\b(LDL|STL)\b", sass)), len(re.findall(r"\bHGMMA\b", sass))
        cubin.unlink()
        print(f"{name}|stack {stack}|local {local}|wgmma {wgmma}", flush=True)


if __name__ == "__main__":
    main()
