"""Training steps of whole Transformers models: tokens a second, milliseconds, memory, the first step and the loss.

    python -m benchmarks.step.train_step [--model NAME ...] [--mode full ...] [--contender NAME ...] [--liger]
        [--csv FILE]
    torchrun --nproc-per-node 2 -m benchmarks.step.train_step --fsdp ...
    torchrun --nproc-per-node 4 -m benchmarks.step.train_step --expert-parallel --mode QLoRA ...
    python -m benchmarks.step.train_step --profile ...

Models at full width with random weights (models.py), sequences of 4,096 random tokens without padding, the same at every
step, so that a wrong gradient shows in the last loss; fused AdamW. A step is forward, backward, optimiser, and zero_grad;
tokens a second are those of one GPU. Modes: full (all weights, in bf16 with their gradients and Adam's moments),
frozen (LoRA, r = 16, on q and v), LoRA (on the experts too) and QLoRA (experts in NF4, gpt-oss's in
MXFP4, or in --packed), adapters in fp32 under autocast. Ours and Transformers' are first checked on a tiny model
(checking.py; FP8 products are not, whose rounding tests/kernels compares).
Contenders take turns as whole runs from the same weights, in --rounds rounds, each of which begins with another of them;
--attention names what computes the attention of each. Transformers' sonicmoe tunes for minutes, so it runs only if named.
Running out of memory is a result. --profile writes what each part of a step takes (step_parts.py).
--device cpu --tiny checks the script.
"""

from __future__ import annotations

import functools
from itertools import product

import torch

from benchmarks.common.command import RESULTS, Command
from benchmarks.common.contenders import Unavailable
from benchmarks.common.table import Table
from benchmarks.common.timing import release
from benchmarks.step import models
from benchmarks.step.models import CONTENDERS, MODELS, OURS
from benchmarks.step.run import Run, build_prepared, check, compile_as, join_ranks, shard
from benchmarks.step.training import (
    RANK,
    SEQUENCE,
    WARMUP,
    StepMeasurements,
    record,
    sequences,
    time_steps,
    vary_lengths,
)
from sonicmoe_hf.kernels.packed import FORMATS

MODES = ("full", "frozen", "LoRA", "QLoRA")
ATTENTION = ("eager", "torch_sinks", "flex_attention", "sdpa")
DEFAULT_CONTENDERS = ("grouped_mm", OURS, f"{OURS}, nearest")


def runs_of(options) -> list[Run]:
    """List every combination of what was asked for."""
    runs = []
    modes, contenders = options.mode or ["full"], options.contender or DEFAULT_CONTENDERS
    names = options.model or ["Qwen3-30B-A3B"]
    for name, mode, contender, attention in product(names, modes, contenders, options.attention or [None]):
        model = MODELS[name]
        own = model.trained_layers if mode == "full" else model.layers
        layers = own if options.layers is None else options.layers or model.layers
        run = Run(name, layers, options.tokens or model.tokens, mode, contender, attention)
        packed = options.packed or model.packed if mode == "QLoRA" else None
        run = run._replace(experts=packed, checkpointing=options.checkpointing, rank=options.rank)
        runs.append(run._replace(targets=None) if options.whole_attention else run)
    return runs


def launch_of(run: Run, options, world: int) -> str:
    """Write the column `launch` of a run: settings that differ from the defaults, and the packages whose kernels compute
    linear attention or Mamba layers."""
    gpus = f"{world} GPU{'s' * (world > 1)}"
    parts = {
        **{f"{name} {size}": True for name, size in options.sizes.items()},
        f"r = {run.rank}": run.mode != "full" and run.rank != RANK,
        "whole attention": run.mode != "full" and options.whole_attention,
        f"{options.packed} experts": run.mode == "QLoRA" and options.packed,
        f"{run.attention} attention": run.attention is not None,
        f"sequences of {options.sequence_length}": options.sequence_length != SEQUENCE,
        "checkpointing": options.checkpointing,
        f"compiled {options.compile}": options.compile,
        "varying lengths": options.varying_lengths,
        f"FSDP2, {gpus}": options.fsdp,
        f"expert parallelism, {gpus}": options.expert_parallel,
    }
    chosen = (
        models.settings_of(run.model, options)
        + models.kernels_of(run.model)
        + [part for part, is_chosen in parts.items() if is_chosen]
    )
    return ", ".join(chosen) or "plain"


def build_compiled(run: Run, options):
    """Build and prepare the model of `run`, sharded and compiled as the options say. Raises Unavailable."""
    model = build_prepared(run, options)
    if options.fsdp:
        shard(model)
    return compile_as(model, options.compile)


def time_run(run: Run, options) -> StepMeasurements:
    """Train one run anew, and time its steps. Raises Unavailable."""
    model = build_compiled(run, options)
    seed = 1 + torch.distributed.get_rank() if options.expert_parallel else 1
    tokens = sequences(run.tokens, model.config.vocab_size, options.device, seed, options.sequence_length)
    steps = WARMUP + options.steps
    batches = vary_lengths(tokens, steps) if options.varying_lengths else [tokens] * steps
    return time_steps(model, batches, run.mode != "full")


def profile_run(run: Run, options) -> dict[str, float]:
    """Time each part of a step. Raises Unavailable."""
    from benchmarks.step.step_parts import profile_parts

    model = build_compiled(run, options)
    tokens = sequences(run.tokens, model.config.vocab_size, options.device)
    return dict(profile_parts(model, tokens, run.mode != "full", options.steps).metrics())


def columns_of(run: Run, options, world: int) -> tuple[str, ...]:
    """List the columns of a row before its metric."""
    return run.model, f"{run.layers},{run.tokens}", run.contender, run.mode, launch_of(run, options, world)


def measure(table: Table, runs: list[Run], options, world: int) -> None:
    """Measure the rows of runs that take turns: each round trains every one of them anew, and begins with another."""
    if not (options.fsdp or options.expert_parallel):
        check(runs, options, autocast=runs[0].mode != "full")
    results: dict[Run, list[StepMeasurements] | Exception] = {run: [] for run in runs}
    for number in range(options.rounds):
        first = number % len(runs)
        for run in runs[first:] + runs[:first]:
            rounds = results[run]
            if isinstance(rounds, list):
                try:
                    rounds.append(time_run(run, options))
                except (Unavailable, torch.OutOfMemoryError) as error:
                    results[run] = error.with_traceback(None)  # whose frames would hold the model
                release()
                torch.compiler.reset()
    for run, rounds in results.items():
        record(table, columns_of(run, options, world), functools.partial(metrics_of, rounds))


def metrics_of(rounds: list[StepMeasurements] | Exception) -> dict[str, list[float]]:
    """Compute the values of each metric, or the error that there was. What the first step took is the first round's:
    later rounds find kernels compiled."""
    if isinstance(rounds, Exception):
        raise rounds
    return {
        "ms": [ms for measured in rounds for ms in measured.milliseconds],
        "tokens_per_s": [
            1e3 * size / ms for measured in rounds for size, ms in zip(measured.tokens, measured.milliseconds)
        ],
        "peak_GiB": [max(measured.peak_GiB for measured in rounds)],
        "first_step_s": [rounds[0].first_step_s],
        "loss": [measured.loss for measured in rounds],
    }


def group_by_turns(runs: list[Run]) -> list[list[Run]]:
    """Group the runs that take turns: those of one model and mode."""
    cases: dict[Run, list[Run]] = {}
    for run in runs:
        cases.setdefault(run._replace(contender="", attention=None), []).append(run)
    return list(cases.values())


def options_of(arguments=None):
    parser = Command(__doc__, "train_step.csv", "--device cpu --tiny --tokens 64 --layers 2")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: Qwen3-30B-A3B")
    parser.add_argument("--mode", action="append", choices=MODES, help="default: full")
    parser.add_argument(
        "--contender", action="append", choices=list(CONTENDERS), help=f"default: {'; '.join(DEFAULT_CONTENDERS)}"
    )
    parser.add_argument(
        "--layers", type=int, help="0: all; default: as many as one H200 trains fully, all where experts are frozen"
    )
    parser.add_argument("--tokens", type=int, help="a step and GPU; default: 16,384, or what fits the model")
    parser.add_argument("--sequence-length", type=int, default=SEQUENCE, help="at most")
    models.add_settings(parser)
    parser.add_argument("--attention", action="append", choices=ATTENTION, help="default: the model's own")
    parser.add_argument("--packed", choices=FORMATS, help="of the experts in mode QLoRA; default: the model's")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", choices=("layers",), help="torch.compile of each decoder layer")
    parser.add_argument(
        "--varying-lengths",
        action="store_true",
        help="another number of tokens at every step; without cuDNN's attention, which plans anew for each",
    )
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 over the ranks of torchrun, one or more; mode full")
    parser.add_argument(
        "--expert-parallel", action="store_true", help="ranks of torchrun share the experts, FSDP2 shards the rest"
    )
    parser.add_argument("--rank", type=int, default=RANK, help="of adapters")
    parser.add_argument("--whole-attention", action="store_true", help="adapters on all of it, not on q and v alone")
    parser.add_argument("--vocab-size", type=int, help="a small one leaves the head out of the times")
    parser.add_argument("--dense-layers", type=int, help="how many have no experts; default: the model's")
    parser.add_argument("--profile", action="store_true", help="what each part of a step takes, in place of its time")
    parser.add_argument("--steps", type=int, default=8, help="timed, after the warm-up; or profiled")
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often each contender trains anew; another one begins each round"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args(arguments, obstacle)
    sizes = {"vocab_size": options.vocab_size, "first_k_dense_replace": options.dense_layers}
    options.sizes = {name: size for name, size in sizes.items() if size is not None}
    if options.profile and options.csv == RESULTS / "train_step.csv":
        options.csv = RESULTS / "step_parts.csv"
    return options


def obstacle(options) -> str | None:
    """Say which options do not go together."""
    is_parallel = options.fsdp or options.expert_parallel
    if options.profile and (options.checkpointing or options.compile or is_parallel):
        return "--profile tells parts apart only without --checkpointing, --compile and ranks"
    if options.fsdp and set(options.mode or ["full"]) != {"full"}:
        return "--fsdp: mode full only"
    return None


def main():
    options = options_of()
    is_parallel = options.fsdp or options.expert_parallel
    rank, world = join_ranks(options.device) if is_parallel else (0, 1)
    if options.varying_lengths and options.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    table = Table(options.csv)
    for runs in group_by_turns(runs_of(options)):
        if options.profile:
            for run in runs:
                record(table, columns_of(run, options, world), functools.partial(profile_run, run, options))
        else:
            measure(table, runs, options, world)
        if rank == 0:
            table.write()
    if is_parallel:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
