"""Parts of a training step: the GPU and host time of each, from a trace of torch's profiler.

Module hooks mark each part of forward. A kernel belongs to the innermost mark around its launch; in backward, to that of
the forward operation which made the autograd node that launched it. The experts' kernels are split by name into grouped
products, our combine, and the rest. Host time is what the host spends between the marks, backward's nodes included, and
the profiler's own cost with it: read it beside the same part of other contenders.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from benchmarks.step.training import WARMUP, one_step, optimizer_of
from sonicmoe_hf.patching.moe_layers import find_layers

PREFIX = "part:"
PRODUCTS, COMBINE, EXPERTS = "experts: products", "experts: combine", "experts: the rest"
ROUTER, BLOCK = "router", "MoE block: the rest"
MOE = (PRODUCTS, COMBINE, EXPERTS, ROUTER, BLOCK)
REST = "the rest"  # embeddings, masks, residual sums, and accumulating gradients
ORDER = (*MOE, "attention", "norms", "loss", "optimiser", REST)
PRODUCT_NAMES = ("gemm", "cutlass", "nvjet", "scatter2scatter", "group_bwd")  # in kernels' names
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class _Marks:
    """Hooks of one module: its forward is a range of the trace."""

    def __init__(self, part: str):
        self.part, self.open = part, []

    def begin(self, *_):
        self.open.append(record_function(PREFIX + self.part))
        self.open[-1].__enter__()

    def end(self, *_):
        self.open.pop().__exit__(None, None, None)

    def around(self, module: nn.Module):
        return [module.register_forward_pre_hook(self.begin, prepend=True), module.register_forward_hook(self.end)]


def part_of(module: nn.Module) -> str | None:
    """Name the part that a module outside the MoE blocks is."""
    kind = type(module).__name__
    if "Norm" in kind:
        return "norms"
    if kind.endswith(("Attention", "RotaryEmbedding")):
        return "attention"
    return None


def mark(model: nn.Module) -> list:
    """Mark the parts of a model's forward; returns the hooks' handles. What follows the stack of layers is the loss."""
    handles = []
    for layer in find_layers(model):
        for part, module in ((BLOCK, layer.block), (ROUTER, layer.router), (EXPERTS, layer.experts)):
            handles += _Marks(part).around(module)
    for module in model.modules():
        if (part := part_of(module)) is not None:
            handles += _Marks(part).around(module)
    whole = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    loss = _Marks("loss")
    handles.append(getattr(whole, whole.base_model_prefix).register_forward_hook(loss.begin))
    handles.append(whole.register_forward_hook(loss.end))
    return handles


class Mark(NamedTuple):
    """A range of one thread: a part's, or a backward node's, whose part is that of its forward."""

    start: float
    end: float
    part: str


class _Thread:
    """The marks of a thread, to be asked for the innermost one around a time."""

    def __init__(self, marks: list[Mark]):
        self.marks = sorted(marks, key=lambda mark: (mark.start, -mark.end))
        self.starts = [mark.start for mark in self.marks]
        self.outer: list[int] = []
        open_marks: list[int] = []
        for number, (start, _, _) in enumerate(self.marks):
            while open_marks and self.marks[open_marks[-1]].end <= start:
                open_marks.pop()
            self.outer.append(open_marks[-1] if open_marks else -1)
            open_marks.append(number)

    def innermost(self, time: float) -> str:
        number = bisect.bisect_right(self.starts, time) - 1
        while number >= 0 and self.marks[number].end < time:
            number = self.outer[number]
        return self.marks[number].part if number >= 0 else REST

    def own_times(self) -> list[tuple[str, float]]:
        """Measure (part, time within its marks, without that within marks inside them)."""
        own = [mark.end - mark.start for mark in self.marks]
        for number, outer in enumerate(self.outer):
            if outer >= 0:
                own[outer] -= self.marks[number].end - self.marks[number].start
        return [(mark.part, time) for mark, time in zip(self.marks, own)]


class Parts(NamedTuple):
    """Milliseconds a step of each part, on the GPU and on the host; kernels: (part, name) -> (milliseconds, launches) a
    step; wall: milliseconds of a step under the profiler."""

    gpu: dict[str, float]
    host: dict[str, float]
    kernels: dict[tuple[str, str], tuple[float, float]]
    wall: float

    def outside(self, *inside: str) -> float:
        """Compute the share of the MoE blocks' GPU time that is in none of these parts."""
        block = sum(self.gpu.get(part, 0.0) for part in MOE)
        return 1 - sum(self.gpu.get(part, 0.0) for part in inside) / block if block else float("nan")

    def metrics(self):
        """Yield (metric, value) for the CSV."""
        for part in ORDER:
            yield f"{part}: GPU ms", self.gpu.get(part, 0.0)
            yield f"{part}: host ms", self.host.get(part, 0.0)
        yield "MoE block: share outside products", self.outside(PRODUCTS)
        yield "MoE block: share outside products and combine", self.outside(PRODUCTS, COMBINE)
        yield "wall ms", self.wall
        for (part, name), (ms, launches) in self.kernels.items():
            yield f"{part}: {name}: kernel ms, {launches:g} launches", ms


def attribute(events: list[dict], steps: int) -> Parts:
    """Read a trace of `steps` steps. events: of a Chrome trace as torch's profiler writes it, microseconds."""
    complete = [event for event in events if event.get("ph") == "X"]
    forward: dict[int, list[Mark]] = {}
    for event in complete:
        if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
            part = event["name"].removeprefix(PREFIX)
            forward.setdefault(event["tid"], []).append(Mark(event["ts"], event["ts"] + event["dur"], part))
    threads = {tid: _Thread(marks) for tid, marks in forward.items()}
    operations = [event for event in complete if event.get("cat") == "cpu_op"]
    part_of_node = _parts_of_nodes(operations, threads)
    marks = {tid: list(own) for tid, own in forward.items()}
    for event in operations:
        if _is_backward(event):
            part = part_of_node.get(event["args"].get("Sequence number"), REST)
            marks.setdefault(event["tid"], []).append(Mark(event["ts"], event["ts"] + event["dur"], part))
    threads = {tid: _Thread(own) for tid, own in marks.items()}
    host: dict[str, float] = {}
    for thread in threads.values():
        for part, time in thread.own_times():
            host[part] = host.get(part, 0.0) + 1e-3 * time / steps
    gpu, kernels = _kernel_times(complete, threads, steps)
    starts, ends = zip(*((event["ts"], event["ts"] + event["dur"]) for event in complete))
    return Parts(gpu, host, kernels, 1e-3 * (max(ends) - min(starts)) / steps)


def _is_backward(event: dict) -> bool:
    return event["name"].startswith("autograd::engine::evaluate_function")


def _parts_of_nodes(operations: list[dict], threads: dict[int, _Thread]) -> dict[int, str]:
    """Map the sequence number of each autograd node to the part whose forward made it: that of the last operation which
    started with the number."""
    latest: dict[int, tuple[float, str]] = {}
    for event in operations:
        number = event.get("args", {}).get("Sequence number", -1)
        if number < 0 or event["args"].get("Fwd thread id", 0) or _is_backward(event) or event["tid"] not in threads:
            continue
        if number not in latest or event["ts"] >= latest[number][0]:
            latest[number] = event["ts"], threads[event["tid"]].innermost(event["ts"])
    return {number: part for number, (_, part) in latest.items()}


def _kernel_times(complete: list[dict], threads: dict[int, _Thread], steps: int):
    """Measure milliseconds by part, and by part and kernel."""
    launches = {
        event["args"]["correlation"]: event
        for event in complete
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    gpu: dict[str, float] = {}
    kernels: dict[tuple[str, str], tuple[float, float]] = {}
    for event in complete:
        if event.get("cat") not in ON_GPU:
            continue
        launch = launches.get(event["args"].get("correlation"))
        thread = threads.get(launch["tid"]) if launch else None
        part = thread.innermost(launch["ts"]) if thread else REST
        if part == EXPERTS:
            part = _part_of_experts(event["name"].lower())
        time = 1e-3 * event["dur"] / steps
        gpu[part] = gpu.get(part, 0.0) + time
        key = part, event["name"].split("(")[0][:70]
        before = kernels.get(key, (0.0, 0.0))
        kernels[key] = before[0] + time, before[1] + 1 / steps
    return gpu, kernels


def _part_of_experts(kernel: str) -> str:
    """Name the part of the experts that a kernel of this name computes."""
    if kernel.startswith("combine_kernel"):  # ours: the weighted sum of each token's rows, forward and backward
        return COMBINE
    return PRODUCTS if any(name in kernel for name in PRODUCT_NAMES) else EXPERTS


def profile_parts(model, tokens, autocast: bool, steps: int) -> Parts:
    """Train `steps` steps after the warm-up, under the profiler."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (tokens.device.type == "cuda")
    optimizer = optimizer_of(model)
    for _ in range(WARMUP):
        one_step(model, optimizer, tokens, autocast)
    handles = mark(model)
    with profile(activities=activities):  # the first trace of a process pays for starting to trace
        one_step(model, optimizer, tokens, autocast)
    with profile(activities=activities) as trace:
        for _ in range(steps):
            one_step(model, optimizer, tokens, autocast)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return attribute(json.loads(path.read_text())["traceEvents"], steps)
