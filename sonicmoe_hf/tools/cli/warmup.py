"""`sonicmoe-hf warmup`: the Hopper kernels that layers need, compiled ahead of the first step into the cache on disk, or
with --compile what torch.compile makes of a model's layers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ...checkpoints.reading.config_only import build_on_meta
from ...layer import backends
from ...layer.config import LAYOUTS, check_order
from ...layer.moe_experts import Activation
from ...layer.projection import RANK_MULTIPLE
from ...patching.experts import experts_facts, sizes_of
from ...patching.support import accelerated_layers, supports
from ...private.torch import compile_cache_folder
from .bar import progress


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


def warmup(
    model: str | None,
    shape: list[tuple[int, int]],
    layout: str,
    activation: str,
    bias: bool,
    dtype: str,
    processes: int | None,
    compile: bool,
    quantize: str | None,
    rank: int,
    batch_size: int,
    tokens: int | None,
    liger: bool,
) -> int:
    """Run `sonicmoe-hf warmup`."""
    if (model is None) == (not shape):
        raise ValueError(
            "give a model, or --shape H,I: sonicmoe-hf warmup MODEL, or sonicmoe-hf warmup --shape 2048,768"
        )
    torch_dtype = getattr(torch, dtype)
    if compile:
        if model is None:
            raise ValueError("--compile takes a model: sonicmoe-hf warmup MODEL --compile")
        return _warm_up_torch(model, torch_dtype, quantize, rank, batch_size, tokens, liger)
    if model is None:
        kinds = [LayerKind(*sizes, torch_dtype, Activation(activation), layout, bias) for sizes in shape]
    else:
        kinds = kinds_of_model(build_on_meta(model), torch_dtype)
        if not kinds:
            raise ValueError(f"{model} has no layer that is supported; sonicmoe-hf doctor says why")
    if quantize is not None:
        kinds = [replace(kind, quantize=quantize, rank=rank) for kind in kinds]
    began = time.perf_counter()
    total, outcomes = warm_up(kinds, processes)
    for kind in kinds:
        print(kind)
    compiled = 0
    with progress("compiling") as move:
        move(0, total)
        for number, outcome in enumerate(outcomes, 1):
            compiled += outcome.seconds is not None
            what = "was there" if outcome.seconds is None else f"compiled in {outcome.seconds:.1f} s"
            print(f"[{number:{len(str(total))}}/{total}] {outcome.kernel} {what}", flush=True)
            move(number, total)
    from ...kernels.hopper.variants import on_triton

    seconds = time.perf_counter() - began
    print(f"{total} kernels in {cache_folder()}: {compiled} compiled now, {seconds:.1f} s")
    on_triton_too = [kind for kind in kinds if on_triton(kind.hidden, kind.inner, kind.activation)]
    for kind in on_triton_too:
        print(describe_kernels(kind.hidden, kind.inner, kind.activation))
    return 1 if on_triton_too else 0


def _warm_up_torch(model: str, *settings) -> int:
    from .warmup_compile import Settings, compile_ahead  # which imports PEFT

    began = time.perf_counter()
    graphs = compile_ahead(model, Settings(*settings))
    seconds = time.perf_counter() - began
    folder, total = compile_cache_folder(), graphs.there + graphs.added
    print(f"graphs of layers in {folder}: {total}, of which {graphs.added} compiled now, {seconds:.1f} s")
    obstacles = list(graphs.reasons)
    if graphs.refused:
        obstacles.append(
            f"torch {torch.__version__} does not keep {graphs.refused} graphs more; TORCH_LOGS=+aot says why"
        )
    for obstacle in obstacles:
        print(obstacle)
    return 1 if obstacles or not total else 0


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


def warm_up(kinds: list[LayerKind], processes: int | None = None) -> tuple[int, Iterator[Outcome]]:
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
