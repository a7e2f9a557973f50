"""The Hopper kernels that layers need, compiled into the cache on disk; which of a layer's products run on them."""

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

from ...layer import backends
from ...layer.config import LAYOUTS, check_order
from ...layer.moe_experts import Activation
from ...layer.projection import RANK_MULTIPLE
from ...patching.experts import experts_facts, sizes_of
from ...patching.support import accelerated_layers, supports


@dataclass(frozen=True)
class LayerKind:
    """The facts of a layer that decide which kernels it needs: sizes H and I, dtype, activation, layout, biases; and
    where its experts are packed, their format and the rank of their adapters."""

    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = field(default_factory=Activation)
    layout: str = "concatenated"
    bias: bool = False
    quantize: str | None = None
    rank: int = 0

    def __post_init__(self):
        check_order(self.layout, self.activation.name)

    def __str__(self):
        biases = ", biases" if self.bias else ""
        dtype = str(self.dtype).removeprefix("torch.")
        packed = f", {self.quantize} experts, adapters of rank {self.rank}" if self.quantize else ""
        return f"H={self.hidden} I={self.inner}, {self.layout}, {self.activation.name}, {dtype}{biases}{packed}"

    def kernels(self) -> list[tuple[str, tuple]]:
        """List (function of kernels/hopper/compiled.py, its parameters) of the kernels; the DSL is installed."""
        from ...kernels.hopper.variants import packed_variants, variants

        transposed, interleaved = LAYOUTS[self.layout]
        sizes = self.hidden, self.inner, self.dtype, self.activation
        if self.quantize is None:
            return variants(*sizes, transposed, interleaved, self.bias)
        rank = -(-self.rank // RANK_MULTIPLE) * RANK_MULTIPLE
        return packed_variants(*sizes, interleaved, self.bias, self.quantize, rank)


class Outcome(NamedTuple):
    """One kernel: its name, and the seconds its compilation took, or None where the cache had it."""

    kernel: str
    seconds: float | None


def kinds_of_model(model: torch.nn.Module, dtype: torch.dtype) -> list[LayerKind]:
    """Find the different layers of a model (also on the meta device) that sonicmoe_hf accelerates."""
    kinds = []
    for layer in accelerated_layers(model, supports(model)):
        facts, sizes = experts_facts(layer.experts), sizes_of(layer.experts)
        kinds.append(
            LayerKind(sizes.hidden, sizes.intermediate, dtype, facts.activation, facts.layout, facts.has_bias)
        )
    return list(dict.fromkeys(kinds))


def describe_kernels(hidden: int, inner: int, activation: Activation) -> str:
    """Say which of a layer's products run on the Hopper kernels; triton is installed."""
    from ...kernels.hopper.variants import on_triton
    from ...kernels.triton.config import FEW_ROWS

    functions = on_triton(hidden, inner, activation)
    sizes = f"H={hidden}, I={inner}"
    if not functions:
        return (
            f"{sizes}: on a Hopper GPU, in bf16 and fp16, every product runs on the Hopper kernels, except "
            f"that up and down_backward run on Triton where experts have {FEW_ROWS} rows or fewer on average, as it is "
            "faster there"
        )
    return (
        f"{sizes}: {', '.join(functions)} run on the Triton kernels on a Hopper GPU too; the Hopper kernels take sizes "
        "that are multiples of 8 above 64"
    )


def compile_for_layers(kinds: list[LayerKind], processes: int | None = None) -> tuple[int, Iterator[Outcome]]:
    """Count the kernels that the layers need, and yield their outcomes as they come.

    Args:
        kinds: the layers. processes: that compile at a time; None is one for each CPU.
    Raises:
        ValueError: a package is missing, or the cache is not to be trusted. OSError: it cannot be written.
    """
    if obstacle := backends.missing_for_hopper():
        raise ValueError(f"the Hopper kernels cannot be compiled here: {obstacle}")
    wanted = dict.fromkeys(kernel for kind in kinds for kernel in kind.kernels())
    return len(wanted), compile_kernels(list(wanted), processes or os.cpu_count() or 1)


def cache_folder() -> Path:
    """Find the folder where compiled kernels are kept."""
    from ...kernels.hopper import cache

    return cache.folder()


def compile_kernels(wanted: list[tuple[str, tuple]], processes: int) -> Iterator[Outcome]:
    """Compile the kernels, (function of kernels/hopper/compiled.py, its parameters), that the cache does not have."""
    from ...kernels.hopper import cache

    if reason := cache.why_untrusted():
        raise ValueError(reason)
    missing = cache.missing(wanted)
    for kernel in wanted:
        if kernel not in missing:
            yield Outcome(kernel[0], None)
    if not missing:
        return
    cache.make_folder()
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
                    raise ValueError(
                        f"{cache.folder()} cannot be written; set {cache.CACHE_VARIABLE} to another folder"
                    )
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(name: str, parameters: tuple) -> float:
    from ...kernels.hopper import compiled

    began = time.perf_counter()
    getattr(compiled, name)(*parameters)
    return time.perf_counter() - began
