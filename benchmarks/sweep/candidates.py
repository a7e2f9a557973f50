"""What the sweeps have in common: candidates are compiled in processes of their own first, take turns, and are compared
with the first of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
from triton.runtime import JITFunction

from benchmarks.common import provenance
from benchmarks.common.measuring import graph_of, largest_error
from sonicmoe_hf.kernels.triton import launch as launching

ORIGIN = {"gpu": provenance.gpu(), **provenance.columns()}
ROUNDS, WARM = 16, 4
SHARES = 14  # processes that compile


class NothingKept(dict):
    """Every launch is a first one: here the first only compiles."""

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


def interleaved_us(replays: list[Callable]) -> list[float]:
    """The median time of each graph; they take turns without a pause, so that all run at the clock that a GPU keeps."""
    times: list[list] = [[] for _ in replays]
    for _ in range(ROUNDS):
        for replay, events in zip(replays, times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay()
            end.record()
            events.append((start, end))
    torch.cuda.synchronize()
    return [
        1e3 * sorted(start.elapsed_time(end) for start, end in events[WARM:])[(ROUNDS - WARM) // 2] for events in times
    ]


def timed(candidates: Iterable[tuple[str, Callable, Callable]]) -> Iterator[tuple[str, float, float]]:
    """(name, microseconds, relative difference from the first) of each (name, what has it used, call)."""
    first, ran = None, []
    for name, use, call in candidates:
        use()
        try:
            results = call()
            results = [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]
            first = first or results
            ran.append((name, largest_error(results, first), graph_of(call)))
        except Exception as error:  # as in compile_share
            print("failed", name, str(error)[:80])
    for us, (name, difference, _) in zip(interleaved_us([replay for *_, replay in ran]), ran):
        yield name, us, difference


def write(
    table, shape, kernel: str, found: Iterable[tuple[str, float, float]], flop: float | None = None, calls: int = 1
) -> None:
    """Rows of the CSV, and a line with the fastest first. flop: of a call; calls: of each graph."""
    lines = []
    for name, us, difference in found:
        us /= calls
        rate = [] if flop is None else [f"{flop / us / 1e6:.0f}"]
        table.writerow([shape, kernel, name, f"{us:.2f}", *rate, f"{difference:.1e}", *ORIGIN.values()])
        lines.append((us, " ".join([name, f"{us:.1f} us", *rate, f"DIFFERS {difference:.1e}" * (difference >= 1e-2)])))
    print(shape, kernel, "|", " | ".join(line for _, line in sorted(lines)), flush=True)
