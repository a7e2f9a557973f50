"""Times of calls on a GPU or a CPU."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Release the memory of what ran before, and its peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def record_graph(call):
    """Record (a CUDA graph of `call`, what it returns), after a warm-up on a side stream, as capturing wants it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def make_replay(call):
    """Make a function that replays a CUDA graph of `call`, so that the device's time is seen without the host's."""
    graph, _ = record_graph(call)
    return graph.replay


def make_replays(calls: dict) -> dict:
    """Capture each call by its name with `make_replay`; leave out those that cannot be captured (they synchronise)."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = make_replay(call)
        except (RuntimeError, torch.AcceleratorError) as error:
            print(f"    no CUDA graph of {name}: {str(error).splitlines()[0][:100]}", flush=True)
            torch.cuda.synchronize()
    return graphs


class Clock:
    """The times at which the device reached so many points; the host waits for it only when asked for them."""

    def __init__(self, count: int):
        self.on_gpu, self.points = torch.cuda.is_available(), []
        self.events = iter([torch.cuda.Event(enable_timing=True) for _ in range(count)] if self.on_gpu else ())

    def note(self) -> None:
        if self.on_gpu:
            self.points.append(next(self.events))
            self.points[-1].record()
        else:
            self.points.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Compute the milliseconds between each two points."""
        synchronize()
        pairs = list(zip(self.points, self.points[1:]))
        return [before.elapsed_time(after) if self.on_gpu else 1e3 * (after - before) for before, after in pairs]


def waited_times(call, count: int, warmup: int) -> tuple[list[float], list]:
    """Measure the milliseconds of `count` calls after the warm-up, waiting for each. Returns the results of all calls
    too."""
    times, results = [], []
    for _ in range(warmup + count):
        synchronize()
        began = time.perf_counter()
        results.append(call())
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return times[warmup:], results


class CallTimes(NamedTuple):
    """Milliseconds of a call in each round: on the device, until the host had issued it, and until it was done."""

    on_device: list[float]
    issued: list[float]
    waited: list[float]


def interleaved_times(calls: dict, rounds: int) -> dict[Any, CallTimes]:
    """Run every call once in every round, in an order of its own, since the clock that a GPU at its power cap gives a
    call depends on what ran before."""
    times, order, generator = {name: CallTimes([], [], []) for name in calls}, list(calls), random.Random(0)
    for call in calls.values():
        call()
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            clock = Clock(2)
            synchronize()
            began = time.perf_counter()
            clock.note()
            calls[name]()
            clock.note()
            times[name].issued.append(1e3 * (time.perf_counter() - began))
            synchronize()
            times[name].waited.append(1e3 * (time.perf_counter() - began))
            times[name].on_device.extend(clock.milliseconds())
    return times


def hot_times(calls: dict, rounds: int, warmup: int) -> dict[Any, list[float]]:
    """Measure the milliseconds of each call in each round after the warm-up, by name. Calls take turns without a pause,
    so that all run at the clock that a GPU keeps."""
    clocks: dict[Any, list[Clock]] = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        for name, call in calls.items():
            clocks[name].append(Clock(2))
            clocks[name][-1].note()
            call()
            clocks[name][-1].note()
    return {name: [clock.milliseconds()[0] for clock in each[warmup:]] for name, each in clocks.items()}


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Compute the length of the union of spans of time (start, end): in which at least one thing ran."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total
