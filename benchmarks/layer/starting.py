"""The first step of a process, with empty caches and with full ones.

    python -m benchmarks.layer.starting [--shape 2048,2048,768,128,8] [--backend hopper]

Every figure is a new process's: forward and backward of a layer, from when PyTorch, Transformers and sonicmoe_hf have
been imported and the inputs are on the GPU until the gradients are there: with the imports of Triton and cutlass, and
with what is compiled or loaded. The caches are our kernels', Triton's and Python's bytecode. Writes results/starting.csv.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.command import Command
from benchmarks.common.shapes import SHAPES, Shape, problem, shape_of
from benchmarks.common.table import Rows


def time_first_step(shape: Shape, backend: str) -> float:
    """Measure the seconds of this process's first step."""
    from sonicmoe_hf.layer.moe_experts import moe_experts

    x, gate_up, down, expert, weight, dout = problem(shape)
    leaves = [tensor.requires_grad_() for tensor in (x, gate_up, down, weight)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = moe_experts(x, gate_up, down, (expert, weight), backend=backend)
    torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def in_new_processes(shape: Shape, backend: str):
    """Yield (which caches are full, seconds) of processes that run one after the other."""
    command = [sys.executable, "-m", __spec__.name, "--shape", str(shape), "--backend", backend, "--step"]
    with tempfile.TemporaryDirectory() as folder:
        names = {"SONICMOE_HF_CACHE": "kernels", "TRITON_CACHE_DIR": "triton", "PYTHONPYCACHEPREFIX": "bytecode"}
        environment = os.environ | {name: str(Path(folder) / subfolder) for name, subfolder in names.items()}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for full in ("none", "bytecode", "all", "all", "all"):
            if full == "bytecode":
                for name in ("kernels", "triton"):
                    shutil.rmtree(Path(folder) / name, ignore_errors=True)
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            yield full, float(done.stdout.split()[-1])


def main() -> None:
    parser = Command(__doc__, "starting.csv")
    parser.add_argument("--shape", default=str(SHAPES["small"]), help="T,H,I,E,K")
    parser.add_argument("--backend", default="hopper", choices=("hopper", "triton"))
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = shape_of(options.shape)
    if options.step:
        print(time_first_step(shape, options.backend))
        return
    table = Rows(options.csv)
    for full, seconds in in_new_processes(shape, options.backend):
        columns = {"shape": shape, "backend": options.backend, "full caches": full, "seconds": seconds}
        table.add(**columns, cores=os.cpu_count())
    table.write()


if __name__ == "__main__":
    main()
