"""Candidates of the sweeps: they are compiled in processes of their own first, take turns, and are compared with the
first of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from triton.runtime import JITFunction

from benchmarks.common.measuring import largest_error
from benchmarks.common.shapes import Shape
from benchmarks.common.table import Rows, quantile
from benchmarks.common.timing import hot_times, make_replay
from sonicmoe_hf.kernels import triton
from sonicmoe_hf.kernels.interface import Activation
from sonicmoe_hf.kernels.triton import launch as launching

KEYS = ("shape", "kernel")  # of the CSVs' rows
ROUNDS, WARMUP = 12, 4
SHARES = 14  # processes that compile


def add_share(parser) -> None:
    """Add the option by which a sweep calls itself in `compile_in_processes`."""
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)


def products(shape: Shape, inputs, rows=None) -> dict[str, tuple[int, Callable]]:
    """Make kernel -> (FLOP, call of a backend's function); rows: those of the pairs, the Triton backend's unless
    given."""
    x, gate_up, down, expert, weight, dout = inputs
    T, H, I, E, K = shape
    R, act = T * K, Activation()
    weight = weight.float().reshape(-1)
    h, a = torch.randn(R, 2 * I, device=x.device, dtype=x.dtype), torch.randn(R, I, device=x.device, dtype=x.dtype)
    rows = triton.dispatch(expert, None, T, E, True) if rows is None else rows
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


class NothingKept(dict):
    """A cache of launches that keeps none, so that every launch is a first one, which here only compiles."""

    def __setitem__(self, key, value):
        pass


def compile_share(share: int, jobs: Iterable[tuple[str, Callable, Callable]]) -> None:
    """Compile this process's share of the jobs, (name, what has the candidate used, call), and launch nothing."""
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
    launching._COMPILED = NothingKept()
    for number, (name, use, call) in enumerate(jobs):
        if number % SHARES == share:
            use()
            try:
                call()
            except Exception as error:  # a candidate may ask for more than the GPU has: the sweep goes on without it
                print("not compiled", name, str(error)[:100], flush=True)


def compile_in_processes(module: str) -> None:
    """Run `module` with this process's arguments and `--share`, for every share."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--share"]
    workers = [subprocess.Popen([*command, str(share)]) for share in range(SHARES)]
    for worker in workers:
        worker.wait()
    print("compiled", flush=True)


def timed(candidates: Iterable[tuple[str, Callable, Callable]]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, microseconds, relative difference from the first) of each (name, what has it used, call)."""
    first, ran = None, []
    for name, use, call in candidates:
        use()
        try:
            results = call()
            results = [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]
            first = first or results
            ran.append((name, largest_error(results, first), make_replay(call)))
        except Exception as error:  # as in compile_share
            print("failed", name, str(error)[:80])
    times = hot_times({name: replay for name, _, replay in ran}, ROUNDS, WARMUP)
    for name, difference, _ in ran:
        yield name, 1e3 * quantile(times[name]), difference


def add_timed(table: Rows, shape, kernel: str, tile: str, candidates, flop: float | None = None, calls: int = 1):
    """Add rows of `timed`. tile: the column that names the candidate; flop: of a call; calls: of each graph."""
    for name, us, difference in timed(candidates):
        us /= calls
        rate = {} if flop is None else {"TFLOP/s": f"{flop / us / 1e6:.0f}"}
        table.add(shape=shape, kernel=kernel, **{tile: name}, us=us, **rate, difference=f"{difference:.1e}")
