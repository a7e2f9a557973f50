"""`sonicmoe-hf warmup`: the Hopper kernels that layers need, compiled ahead of the first step into the cache on disk, or
with --compile what torch.compile makes of a model's layers."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from ...checkpoints.reading.config_only import build_on_meta
from ...layer.moe_experts import Activation
from ...private.torch import compile_cache_folder
from .bar import progress
from .warmup_kernels import LayerKind, cache_folder, compile_for_layers, describe_kernels, kinds_of_model


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
        options = {"quantize": quantize, "rank": rank, "batch_size": batch_size, "tokens": tokens, "liger": liger}
        return _compile_graphs(model, dtype=torch_dtype, **options)
    if model is None:
        kinds = [LayerKind(*sizes, torch_dtype, Activation(activation), layout, bias) for sizes in shape]
    else:
        kinds = kinds_of_model(build_on_meta(model), torch_dtype)
        if not kinds:
            raise ValueError(f"{model} has no layer that is supported; sonicmoe-hf doctor says why")
    if quantize is not None:
        kinds = [replace(kind, quantize=quantize, rank=rank) for kind in kinds]
    return _compile_kernels(kinds, processes)


def _compile_kernels(kinds: list[LayerKind], processes: int | None) -> int:
    """Compile the kernels of these layers under a bar, print each, and return the exit code."""
    began = time.perf_counter()
    total, outcomes = compile_for_layers(kinds, processes)
    for kind in kinds:
        print(kind)
    compiled = 0
    with progress("compiling") as move:
        move(0, total)
        for number, outcome in enumerate(outcomes, 1):
            compiled += outcome.seconds is not None
            result = "was there" if outcome.seconds is None else f"compiled in {outcome.seconds:.1f} s"
            print(f"[{number:{len(str(total))}}/{total}] {outcome.kernel} {result}", flush=True)
            move(number, total)
    from ...kernels.hopper.variants import on_triton

    seconds = time.perf_counter() - began
    print(f"{total} kernels in {cache_folder()}: {compiled} compiled now, {seconds:.1f} s")
    partly_on_triton = [kind for kind in kinds if on_triton(kind.hidden, kind.inner, kind.activation)]
    for kind in partly_on_triton:
        print(describe_kernels(kind.hidden, kind.inner, kind.activation))
    return 1 if partly_on_triton else 0


def _compile_graphs(model: str, **settings) -> int:
    """Compile a model's layers by torch, print what its cache has of them and lacks, and return the exit code."""
    from .warmup_graphs import Settings, compile_ahead  # which imports PEFT

    began = time.perf_counter()
    graphs = compile_ahead(model, Settings(**settings))
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
