"""Training steps of few tokens, where a GPU waits for Python: eager, with compiled layers, and as CUDA graphs.

    python -m benchmarks.step.small_batches --check [--model NAME]
    python -m benchmarks.step.small_batches [--model NAME] [--mode full|LoRA] [--layers N] [--tokens T ...]
        [--contender NAME ...] [--execution NAME ...] [--csv FILE]

Models at full width with random weights (models.py), one sequence of T random tokens; a step is forward, backward, fused
AdamW and zero_grad. Experts get the rows of a balanced model. Executions: eager; layers, torch.compile of every decoder
layer; reduce-overhead, torch.compile(model, mode="reduce-overhead"), which records CUDA graphs. Each number of tokens is
compiled for on its own. Rows: milliseconds of a step, those in which the GPU was busy (a trace of other steps), their
ratio, peak memory, the first step, the loss, and how many graphs broke or were left uncaptured.

--in-turn has the contenders in memory together and takes a step of each in turn, on an idle GPU, because a host's speed
varies by more than they differ. Rows: milliseconds of a step, and those after which Python has issued it, which are more
than Python takes where over 1,024 launches wait: take few layers. Nothing is checked first.

--check compares loss and gradients of both compiled forms with eager ones, and fails where they differ, where a graph
breaks, or where Inductor does not capture what it compiled. Every measured contender is checked so first, with two layers
(--no-check leaves that out). The CSV keeps the rows of other runs. A run takes 5 s eager, 15 s with compiled layers, and
as CUDA graphs about 4 s for each layer, most of it compiling. Transformers' sonicmoe tunes for minutes at every number of
tokens, so it runs only if named. --device cpu --tiny checks the script itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.contenders import Unavailable
from benchmarks.common.table import Table
from benchmarks.common.timing import Clock, release, synchronize
from benchmarks.step import models
from benchmarks.step.models import CONTENDERS, MODELS, OURS
from benchmarks.step.training import GIB, adapted, one_step, optimizer_of, record, sequences
from sonicmoe_hf.checkpoints.comparing import relative_error
from sonicmoe_hf.patching.support import find_layers

TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192)
EXECUTIONS = ("eager", "layers", "reduce-overhead")
WARMUP = 4  # compiling, CUDA graphs' own warm-up, recording them, replaying them
PROFILED = 3
CHECKED_LAYERS, CHECKED_TOKENS = 2, 1024
# Both are in bf16 with the same routing, and differ in where sums are rounded: 2^-9 at each of some tens of roundings.
CHECK_TOLERANCE = 0.05
ATTENTION = {"gpt-oss-20b": "torch_sinks"}


class Run(NamedTuple):
    """One measurement: a model with so many layers, tokens a step, what is trained, who computes the experts, how Python
    runs it."""

    model: str
    layers: int
    tokens: int
    mode: str
    contender: str
    execution: str


class FixedLoad(models.SpreadLoad):
    """The router's input is the noise alone, so that what is compiled otherwise routes alike."""

    def __call__(self, router, arguments):
        x, *others = arguments
        noise, *_ = super().__call__(router, (torch.zeros_like(x),))
        return noise, *others


def build(run: Run, options):
    """The model as `run` trains it, uncompiled.

    Raises:
        Unavailable: the contender's package is not here, or does not compute this model's experts.
    """
    models.check_available(run.contender)
    contender = CONTENDERS[run.contender]
    ours = contender.implementation == "ours"
    if run.mode == "LoRA" and not ours and contender.implementation != "grouped_mm":
        raise Unavailable(f"{run.contender} has no adapters")
    model = models.build(
        run.model,
        run.layers,
        options,
        implementation="grouped_mm" if ours else contender.implementation,
        attention=ATTENTION.get(run.model) if options.device == "cuda" else None,
    )
    if ours:
        sonicmoe_hf.patch_model(model)
    return adapted(model, run.mode)


def masked(call, run: Run, tokens: torch.Tensor):
    """`call` with a mask of ones for attention that cannot be captured without one (docs/attention.md)."""
    return partial(call, attention_mask=torch.ones_like(tokens)) if run.model in ATTENTION else call


def compiled(model, execution: str):
    """What is called for a step."""
    if execution == "reduce-overhead":
        return torch.compile(model, mode="reduce-overhead", dynamic=False)
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None  # undoes Module.compile, for which torch has no function
        if execution == "layers":
            layer.compile(dynamic=False)
    return model


def decoder_layers(model):
    return [module for module in model.modules() if type(module).__name__.endswith("DecoderLayer")]


def steer(model, hook, tokens: torch.Tensor):
    """Have the hook decide the load, and make its noise before anything is compiled. Returns the hooks' handles."""
    compiled(model, "eager")
    handles = [layer.router.register_forward_pre_hook(hook) for layer in find_layers(model)]
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
        model(input_ids=tokens, use_cache=False)
    return handles


def uncaptured() -> tuple[int, int]:
    """(graphs that Inductor compiled and did not capture, breaks of graphs) since `forget`."""
    return counters["inductor"]["cudagraph_skips"], sum(counters["graph_break"].values())


def forget() -> None:
    """The code and the memory of what ran before."""
    torch.compiler.reset()
    counters.clear()
    release()


def loss_and_gradients(call, model, tokens: torch.Tensor, autocast: bool) -> dict[str, torch.Tensor]:
    """Of the third call: the first two compile and record. CUDA graphs write the next call's results over these."""
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach().clone(), **gradients}


def check(run: Run, options) -> list[str]:
    """What is wrong with the compiled forms of a contender: empty if nothing."""
    run = run._replace(layers=CHECKED_LAYERS, tokens=CHECKED_TOKENS if not options.tiny else 64)
    model, autocast = build(run, options), run.mode != "full"
    tokens = sequences(run.tokens, model.config.vocab_size, options.device)
    steer(model, FixedLoad(), tokens)
    expected, wrong = loss_and_gradients(masked(model, run, tokens), model, tokens, autocast), []
    for execution in EXECUTIONS[1:]:
        forget()
        began = time.perf_counter()
        call = masked(compiled(model, execution), run, tokens)
        actual = loss_and_gradients(call, model, tokens, autocast)
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        worst = max(errors, key=errors.__getitem__)
        skips, breaks = uncaptured()
        print(
            f"check of {run.contender}, {execution}: loss {actual['loss'].item():.4f}, eager "
            f"{expected['loss'].item():.4f}; largest relative error {errors[worst]:.1e} ({worst}), tolerance "
            f"{CHECK_TOLERANCE}; {skips} graphs not captured, {breaks} breaks; {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        wrong += [f"{execution}: {name} {error:.2g}" for name, error in errors.items() if not error < CHECK_TOLERANCE]
        if options.device == "cuda" and execution == "reduce-overhead" and (skips or breaks):
            wrong.append(f"{execution}: {skips} graphs not captured, {breaks} breaks: {dict(counters['graph_break'])}")
    return wrong


def stepping(model, run: Run, options):
    """(the hooks' handles, what takes a step and returns its loss) of a model as `run` has it."""
    tokens = sequences(run.tokens, model.config.vocab_size, options.device)
    handles = steer(model, models.SpreadLoad(), tokens)
    call = masked(compiled(model, run.execution), run, tokens)
    return handles, partial(one_step, call, optimizer_of(model), tokens, run.mode != "full")


def busy_milliseconds(step) -> float:
    """The time in which kernels and copies ran, of a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in trace.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    )
    total, until = 0, 0
    for start, end in spans:
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return 1e-6 * total / PROFILED


def measure(model, run: Run, options) -> dict:
    """metric -> values of one run."""
    forget()
    on_gpu = options.device == "cuda"
    handles, step = stepping(model, run, options)
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
        skips, breaks = uncaptured()
        values |= {"graphs_not_captured": skips, "graph_breaks": breaks}
        if on_gpu:
            values["peak_GiB"] = torch.cuda.max_memory_allocated() / GIB
            busy = busy_milliseconds(step)
            values |= {"busy_ms": busy, "ms_over_busy": statistics.median(values["ms"]) / busy}
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return values


def measure_in_turn(built: dict, run: Run, options) -> dict[str, dict]:
    """contender -> metric -> values of `run`; built: contender -> model."""
    forget()
    handles, steps = [], {}
    taken: dict[str, dict[str, list[float]]] = {name: {"ms": [], "issue_ms": []} for name in built}
    try:
        for name, model in built.items():
            own, steps[name] = stepping(model, run, options)
            handles += own
            for _ in range(WARMUP):
                steps[name]()
        names = list(built)
        for number in range(options.steps):
            for name in names if number % 2 else reversed(names):
                synchronize()
                began = time.perf_counter()
                steps[name]()
                issued = time.perf_counter()
                synchronize()
                taken[name]["issue_ms"].append(1e3 * (issued - began))
                taken[name]["ms"].append(1e3 * (time.perf_counter() - began))
    finally:
        for handle in handles:
            handle.remove()
    return taken


def contenders_of(options) -> Sequence[str]:
    return options.contender or (OURS, "grouped_mm")


def runs_of(options, layers: int, contender: str) -> list[Run]:
    return [
        Run(options.model, layers, tokens, options.mode, contender, execution)
        for execution in options.execution or EXECUTIONS
        for tokens in options.tokens
    ]


def run_in_turn(options, layers: int, table: Table) -> None:
    """--in-turn."""
    first, *_ = names = contenders_of(options)
    runs = runs_of(options, layers, first)
    built = {name: build(runs[0]._replace(contender=name), options) for name in names}
    for run in runs:
        for name, values in measure_in_turn(built, run, options).items():
            table.add(run.model, f"{run.layers},{run.tokens}", name, run.mode, f"{run.execution}, in turn", values)
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
    parser.add_argument("--check", action="store_true", help="only check, with two layers")
    parser.add_argument("--no-check", action="store_true", help="measure without")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    return parser.parse_args(arguments)


def main():
    options = options_of()
    # every number of tokens is compiled for anew, and each layer's weights are other inputs of the same code
    torch._dynamo.config.recompile_limit = 128
    sizes = MODELS[options.model]
    layers = options.layers or (sizes.trained_layers if options.mode == "full" else sizes.layers)
    table, wrong = Table(options.csv), []
    if options.in_turn:
        return run_in_turn(options, layers, table)
    for contender in contenders_of(options):
        runs = runs_of(options, layers, contender)
        try:
            if not options.no_check:
                wrong += [f"{contender}, {what}" for what in check(runs[0], options)]
                forget()
            model = None if options.check else build(runs[0], options)  # which the runs share
        except Unavailable as reason:
            print(f"{contender} is left out: {reason}", flush=True)
            continue
        for run in () if options.check else runs:
            shape = f"{run.layers},{run.tokens}"
            columns = run.model, shape, contender, run.mode, run.execution
            record(table, columns, partial(measure, model, run, options))
            table.write()
        del model
        forget()
    if wrong:
        raise SystemExit("\n".join(["compiled steps are wrong:", *wrong[:20]]))


if __name__ == "__main__":
    main()
