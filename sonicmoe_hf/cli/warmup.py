"""Compiles the Hopper kernels that a layer needs, ahead of its first step, into the cache on disk; needs no GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import WarmupError
from ..layer import backends
from ..layer.config import LAYOUTS, check_order
from ..layer.moe_experts import Activation


@dataclass(frozen=True)
class LayerKind:
    """What of a layer decides which kernels it needs: sizes H and I, dtype, activation, layout, biases."""

    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = field(default_factory=Activation)
    layout: str = "concatenated"
    bias: bool = False

    def __post_init__(self):
        check_order(self.layout, self.activation.name)

    def __str__(self):
        biases = ", biases" if self.bias else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"H={self.hidden} I={self.inner}, {self.layout}, {self.activation.name}, {dtype}{biases}"


class Outcome(NamedTuple):
    """One kernel: its name, and the seconds its compilation took, or None where the cache had it."""

    kernel: str
    seconds: float | None


def kinds_of_model(model: torch.nn.Module, dtype: torch.dtype) -> list[LayerKind]:
    """The different layers of a model (also on the meta device) that sonicmoe_hf accelerates."""
    from ..patching.experts import experts_facts, sizes_of
    from ..patching.support import supported_layers, supports

    kinds = []
    for layer in supported_layers(model, supports(model), "accelerated"):
        facts, sizes = experts_facts(layer.experts), sizes_of(layer.experts)
        kinds.append(
            LayerKind(sizes.hidden, sizes.intermediate, dtype, facts.activation, facts.layout, facts.has_bias)
        )
    return list(dict.fromkeys(kinds))


def on_triton(hidden: int, inner: int, activation: Activation) -> list[str]:
    """The functions (kernels/interface.py) that run on the Triton kernels on a Hopper GPU too; triton is installed."""
    from ..kernels.hopper.variants import on_triton

    return on_triton(hidden, inner, activation)


def placement(hidden: int, inner: int, activation: Activation) -> str:
    """Which of a layer's products run on the Hopper kernels, in words; triton is installed."""
    from ..kernels.triton.config import FEW

    refused = on_triton(hidden, inner, activation)
    sizes = f"H={hidden}, I={inner}"
    if not refused:
        return (
            f"{sizes}: on a Hopper GPU, in bf16 and fp16, every product runs on the Hopper kernels, except "
            f"that up and down_backward run on Triton where experts have {FEW} rows or fewer on average, as it is faster "
            "there"
        )
    return (
        f"{sizes}: {', '.join(refused)} run on the Triton kernels on a Hopper GPU too; the Hopper kernels take sizes "
        "that are multiples of 8 above 64"
    )


def warm_up(kinds: list[LayerKind], processes: int | None = None) -> tuple[int, Iterator[Outcome]]:
    """How many kernels the layers need, and their outcomes as they come.

    Args:
        kinds: the layers. processes: that compile at a time; None is one for each CPU.
    Raises:
        WarmupError: a package is missing, or the cache cannot be written.
    """
    if obstacle := backends.missing_for_hopper():
        raise WarmupError(f"the Hopper kernels cannot be compiled here: {obstacle}")
    from ..kernels.hopper.variants import variants

    wanted: dict[tuple[str, tuple], None] = {}
    for kind in kinds:
        facts = kind.dtype, kind.activation, *LAYOUTS[kind.layout], kind.bias
        wanted |= dict.fromkeys(variants(kind.hidden, kind.inner, *facts))
    return len(wanted), compile_kernels(list(wanted), processes or os.cpu_count() or 1)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    from ..kernels.hopper import cache

    return cache.folder()


def compile_kernels(wanted: list[tuple[str, tuple]], processes: int) -> Iterator[Outcome]:
    """Compile the kernels, (function of kernels/hopper/compiled.py, its parameters), that the cache does not have."""
    from ..kernels.hopper import cache

    if reason := cache.why_untrusted():
        raise WarmupError(reason)
    missing = cache.missing(wanted)
    for kernel in wanted:
        if kernel not in missing:
            yield Outcome(kernel[0], None)
    if not missing:
        return
    try:
        cache.make_folder()
    except OSError as error:
        raise WarmupError(f"the cache cannot be written ({error}); set {cache.VARIABLE} to another folder") from error
    # threads do not help, the compiler holds Python's lock; and a fork of a process that uses CUDA cannot be used
    context = multiprocessing.get_context("spawn")
    # an interrupt is for this process alone, which then cancels what has not begun
    ignored = signal.SIGINT, signal.SIG_IGN
    with ProcessPoolExecutor(
        min(processes, len(missing)), context, initializer=signal.signal, initargs=ignored
    ) as pool:
        running = {pool.submit(_compile, *kernel): kernel for kernel in missing}
        try:
            for done in as_completed(running):
                yield Outcome(running[done][0], done.result())
                if not cache.is_intact(cache.path_of(*running[done])):
                    raise WarmupError(f"{cache.folder()} cannot be written; set {cache.VARIABLE} to another folder")
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(name: str, parameters: tuple) -> float:
    from ..kernels.hopper import compiled

    began = time.perf_counter()
    getattr(compiled, name)(*parameters)
    return time.perf_counter() - began
