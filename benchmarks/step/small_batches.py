"""Training steps of few tokens, where a GPU waits for Python: eager, with compiled layers, and as CUDA graphs.

    python -m benchmarks.step.small_batches [--model NAME] [--mode full|LoRA] [--layers N] [--tokens T ...]
        [--contender NAME ...] [--execution NAME ...] [--csv FILE]

Models at full width with random weights (models.py), one sequence of T random tokens; a step is forward, backward, fused
AdamW and zero_grad. Experts get the rows of a balanced model. Executions: eager; layers, torch.compile of every decoder
layer; reduce-overhead, torch.compile(model, mode="reduce-overhead"), which records CUDA graphs. Each number of tokens is
compiled for on its own. Rows: milliseconds of a step, those in which the GPU was busy (a trace of other steps), their
ratio, peak memory, the first step, the loss, and how many graphs broke or were left uncaptured.

--in-turn has the contenders in memory together and takes a step of each in turn, on an idle GPU, because a host's speed
varies by more than they differ. Rows: milliseconds of a step, and those after which Python has issued it, which are more
than Python takes where over 1,024 launches wait: take few layers.

The CSV keeps the rows of other runs. A run takes 5 s eager, 15 s with compiled layers, and as CUDA graphs about 4 s for
each layer, most of it compiling. Transformers' sonicmoe tunes for minutes at every number of tokens, so it runs only if
named. --device cpu --tiny checks the script itself.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.command import Command
from benchmarks.common.contenders import Unavailable
from benchmarks.common.table import Table
from benchmarks.common.timing import Clock, interleaved_times, release, synchronize, union_length
from benchmarks.step.models import CONTENDERS, MODELS, OURS
from benchmarks.step.run import Run, build_prepared, compile_as
from benchmarks.step.training import GIB, one_step, optimizer_of, record, sequences

TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)
EXECUTIONS = ("eager", "layers", "reduce-overhead")
WARMUP = 4  # compiling, CUDA graphs' own warm-up, recording them, replaying them
PROFILED = 3
ATTENTION = {"gpt-oss-20b": "torch_sinks"}


def add_mask(call, run: Run, tokens: torch.Tensor):
    """Wrap `call` with a mask of ones for attention that cannot be captured without one (docs/attention.md)."""
    return call if run.attention is None else partial(call, attention_mask=torch.ones_like(tokens))


def count_uncaptured() -> tuple[int, int]:
    """Count (graphs that Inductor compiled and did not capture, breaks of graphs) since `forget`."""
    return counters["inductor"]["cudagraph_skips"], sum(counters["graph_break"].values())


def forget() -> None:
    """Forget the code and the memory of what ran before."""
    torch.compiler.reset()
    counters.clear()
    release()


def make_step(model, run: Run, execution: str, device: str):
    """Make a function that takes a step of the prepared model of `run`, and returns its loss.

    A forward comes first, in which the noise that spreads the load is made: compiled code makes none.
    """
    tokens = sequences(run.tokens, model.config.vocab_size, device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        compile_as(model, "eager")(input_ids=tokens, use_cache=False)
    call = add_mask(compile_as(model, execution, dynamic=False), run, tokens)
    return partial(one_step, call, optimizer_of(model), tokens, run.mode != "full")


def measure_busy(step) -> float:
    """Measure the milliseconds of a step in which kernels and copies ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in trace.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]
    return 1e-6 * union_length(spans) / PROFILED


def measure(model, run: Run, execution: str, options) -> dict:
    """Measure one run: metric -> values."""
    forget()
    on_gpu = options.device == "cuda"
    step = make_step(model, run, execution, options.device)
    clock = Clock(1 + options.steps)
    try:
        began = time.perf_counter()
        for number in range(WARMUP):
            loss = step()
            synchronize()
            if number == 0:
                first_step_s = time.perf_counter() - began
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        clock.note()
        for _ in range(options.steps):
            loss = step()
            clock.note()
        values = {"ms": clock.milliseconds(), "first_step_s": first_step_s, "loss": loss.item()}
        skips, breaks = count_uncaptured()
        values |= {"graphs_not_captured": skips, "graph_breaks": breaks}
        if on_gpu:
            values["peak_GiB"] = torch.cuda.max_memory_allocated() / GIB
            busy = measure_busy(step)
            values |= {"busy_ms": busy, "ms_over_busy": statistics.median(values["ms"]) / busy}
    finally:
        model.zero_grad(set_to_none=True)
    return values


def runs_of(options) -> dict[str, Run]:
    """Make contender -> its run."""
    sizes = MODELS[options.model]
    layers = options.layers or (sizes.trained_layers if options.mode == "full" else sizes.layers)
    attention = ATTENTION.get(options.model) if options.device == "cuda" else None
    names = options.contender or (OURS, "grouped_mm")
    return {name: Run(options.model, layers, 0, options.mode, name, attention) for name in names}


def run_in_turn(options, table: Table) -> None:
    """Run the models in turn, for --in-turn."""
    runs = runs_of(options)
    models_of = {name: build_prepared(run, options) for name, run in runs.items()}
    for execution, tokens in itertools.product(options.execution or EXECUTIONS, options.tokens):
        forget()
        steps = {}
        for name, run in runs.items():
            steps[name] = make_step(models_of[name], run._replace(tokens=tokens), execution, options.device)
            for _ in range(WARMUP):
                steps[name]()
        for name, times in interleaved_times(steps, options.steps).items():
            columns = options.model, f"{runs[name].layers},{tokens}", name, options.mode, f"{execution}, in turn"
            table.add(*columns, {"ms": times.waited, "issue_ms": times.issued})
        table.write()


def options_of(arguments=None):
    parser = Command(__doc__, "small_batches.csv", "--device cpu --tiny --tokens 64")
    parser.add_argument("--model", choices=("Qwen3-30B-A3B", "gpt-oss-20b"), default="Qwen3-30B-A3B")
    parser.add_argument("--mode", choices=("full", "LoRA"), default="full")
    parser.add_argument("--layers", type=int, help="default: as many as one H200 trains, all of them with LoRA")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help=f"default: {OURS}; grouped_mm")
    parser.add_argument("--execution", action="append", choices=EXECUTIONS, help="default: all")
    parser.add_argument("--steps", type=int, default=10, help="timed, after the warm-up")
    parser.add_argument("--in-turn", action="store_true", help="contenders' steps in turn, to compare their host time")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    return parser.parse_args(arguments)


def main():
    options = options_of()
    options.spread_load = True
    # every number of tokens is compiled for anew, and each layer's weights are other inputs of the same code
    torch._dynamo.config.recompile_limit = 128
    table = Table(options.csv)
    if options.in_turn:
        return run_in_turn(options, table)
    for contender, run in runs_of(options).items():
        try:
            model = build_prepared(run, options)  # which the runs share
        except Unavailable as reason:
            print(f"{contender} is left out: {reason}", flush=True)
            continue
        for execution, tokens in itertools.product(options.execution or EXECUTIONS, options.tokens):
            columns = run.model, f"{run.layers},{tokens}", contender, run.mode, execution
            record(table, columns, partial(measure, model, run._replace(tokens=tokens), execution, options))
            table.write()
        del model
        forget()


if __name__ == "__main__":
    main()
