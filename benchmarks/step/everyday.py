"""Everyday steps: LoRA on experts and attention with gradient checkpointing and few tokens, where a GPU waits for Python.

    python -m benchmarks.step.everyday [--experts nf4 bf16] [--settings 512 2048 4096 16384 field] [--layers 12]
        [--contender NAME ...] [--without-checkpointing] [--detail 2048]

Layers of Qwen3-30B-A3B with random weights, experts in NF4 or bf16, fp32 adapters of rank 16 on q, k, v, o and the
experts, bf16 autocast, fused AdamW, Liger's fused loss, and its RMSNorm and RoPE where nothing is compiled. Rows per
expert are those of a balanced model. The contenders: `sonicmoe-hf`, the same with its layers compiled
(`sonicmoe_hf.compile_layers`), also captured as CUDA graphs (`mode="reduce-overhead"`), and `grouped_mm` with PEFT's own
computation of adapters, for experts in bf16.

A setting is the tokens of a step, in sequences of at most 4,096; or `field`, what many people run: four micro-batches a
step of two padded rows, each row of 24 to 2,048 tokens (lognormal, about 190 in the mean), others at every step. Chunks
of Liger's loss and cuDNN's attention are for all contenders as `sonicmoe_hf.attach` has them in a Trainer.

busy_ms: in which the GPU computes, of a step. kernels: launches of a step. `--device cpu --tiny --settings 64 field`
checks the script.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
import time
from functools import partial
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerState

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.common.timing import Clock, release, synchronize, union_length
from benchmarks.step import models
from benchmarks.step.models import OURS, SpreadLoad
from benchmarks.step.run import Run, build_base, prepare
from benchmarks.step.training import GIB, RANK, WHOLE_ATTENTION, optimizer_of, record, sequences
from sonicmoe_hf.patching.moe_layers import find_layers
from sonicmoe_hf.trainer.lengths import VaryingLengths
from sonicmoe_hf.trainer.liger_loss import LigerLoss, chunk_mem_const

MODEL, FIELD = "Qwen3-30B-A3B", "field"
COMPILED, CAPTURED, GROUPED = f"{OURS}, compiled layers", f"{OURS}, captured layers", "grouped_mm"
CONTENDERS = OURS, COMPILED, CAPTURED, GROUPED
WARMUP, MICRO_BATCHES, ROWS, MAX_TOKENS = 4, 4, 2, 16384


class Kernels(NamedTuple):
    """The GPU's work in a step: ms in which it was busy, and of each kernel's name the ms and the launches."""

    busy_ms: float
    ms: collections.Counter
    launches: collections.Counter


def steps_of(setting: str, count: int, vocabulary: int, device: str, tiny: bool) -> list[list[dict]]:
    """Draw the micro-batches of each step, the same for every contender."""
    if setting != FIELD:
        ids = sequences(int(setting), vocabulary, device)
        return [[{"input_ids": ids, "labels": ids}]] * count
    random = torch.Generator().manual_seed(7)
    lengths = (torch.randn(count, MICRO_BATCHES, ROWS, generator=random) * 0.6 + 5.07).exp().round().clamp(24, 2048)
    lengths = (lengths / 16).clamp(min=8) if tiny else lengths
    return [[_draw_padded(pair, vocabulary, device) for pair in step] for step in lengths.int().tolist()]


def _draw_padded(lengths: list[int], vocabulary: int, device: str) -> dict:
    width = max(lengths)
    ids = sequences(ROWS * width, vocabulary, device).view(ROWS, width)
    is_token = torch.arange(width, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    return {
        "input_ids": ids.masked_fill(~is_token, 0),
        "attention_mask": is_token.long(),
        "labels": ids.masked_fill(~is_token, -100),
    }


def take_step(model, optimizer, batches: list[dict], device: str, lengths: VaryingLengths) -> torch.Tensor:
    """Take a step of several micro-batches, and return their mean loss, on the device. lengths: what `attach` adds to a
    Trainer."""
    losses, hidden = [], model.config.hidden_size
    for batch in batches:
        lengths.note(batch)
        chunk = {"chunk_mem_const": chunk_mem_const(batch["input_ids"].numel(), hidden)} if device == "cuda" else {}
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch, use_cache=False, **chunk).loss / len(batches)
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).sum()


def profile_kernels(step) -> Kernels:
    """Trace the kernels of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    return kernels_of(trace)


def kernels_of(trace: profile) -> Kernels:
    """Sum up the kernels of a trace."""
    ms, launches, spans = collections.Counter(), collections.Counter(), []
    for event in trace.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation():
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            ms[event.name()[:72]] += event.duration_ns() / 1e6
            launches[event.name()[:72]] += 1
    return Kernels(union_length(spans) / 1e6, ms, launches)


def build(contender: str, experts: str, checkpointing: bool, options):
    """Build the model of a contender, with its adapters."""
    run = Run(MODEL, options.layers, 0, "LoRA", GROUPED if contender == GROUPED else OURS)._replace(
        experts=None if experts == "bf16" else experts,
        checkpointing=checkpointing,
        rank=RANK,
        targets=WHOLE_ATTENTION,
    )
    model = build_base(run, argparse.Namespace(device=options.device, tiny=options.tiny))
    if options.device == "cuda" and contender in (COMPILED, CAPTURED):
        models.use_fused_loss(model)
    elif options.device == "cuda":
        models.apply_liger(MODEL, model)
    hook = SpreadLoad()
    hook.make(MAX_TOKENS, model.config.hidden_size, options.device, torch.bfloat16)
    for layer in find_layers(model):
        layer.router.register_forward_pre_hook(hook)
    model = prepare(model, run)
    if contender in (COMPILED, CAPTURED):
        on_gpu = {"mode": "reduce-overhead"} if contender == CAPTURED else {}
        sonicmoe_hf.compile_layers(model, **({"backend": "aot_eager"} if options.device == "cpu" else on_gpu))
    return model


def measure(model, setting: str, options) -> dict:
    """Measure one setting: metric -> values."""
    torch.compiler.reset()
    lengths, loss_chunks = VaryingLengths(), LigerLoss()
    for callback in (lengths, loss_chunks):
        callback.on_train_begin(None, TrainerState(), None, model=model)
    steps = steps_of(setting, WARMUP + options.steps, model.config.vocab_size, options.device, options.tiny)
    optimizer, clock = optimizer_of(model), Clock(1 + options.steps)
    began = time.perf_counter()
    for batches in steps[:WARMUP]:
        take_step(model, optimizer, batches, options.device, lengths)
    synchronize()
    warmup_s = time.perf_counter() - began
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock.note()
    for batches in steps[WARMUP:]:
        loss = take_step(model, optimizer, batches, options.device, lengths)
        clock.note()
    ms = clock.milliseconds()
    tokens = [sum(int((batch["labels"] >= 0).sum()) for batch in batches) for batches in steps[WARMUP:]]
    values = {
        "ms": ms,
        "tokens_per_second": 1e3 * statistics.mean(tokens) / statistics.mean(ms),
        "warmup_s": warmup_s,
        "loss": loss.item(),
    }
    if options.device == "cuda":
        values["peak_GiB"] = torch.cuda.max_memory_allocated() / GIB
        step = partial(take_step, model, optimizer, steps[-1], options.device, lengths)
        kernels = profile_kernels(step)
        values |= {"busy_ms": kernels.busy_ms, "kernels": sum(kernels.launches.values())}
        values["ms_over_busy"] = statistics.median(ms) / kernels.busy_ms
        if setting in options.detail:
            for name, total in kernels.ms.most_common(30):
                print(f"      {total:8.2f} ms x{kernels.launches[name]:5d}  {name}", flush=True)
    for callback in (lengths, loss_chunks):
        callback.end()
    return values


def main() -> None:
    parser = Command(__doc__, "everyday.csv", "--device cpu --tiny --settings 64 field")
    parser.add_argument("--experts", nargs="+", choices=("nf4", "bf16"), default=("nf4", "bf16"))
    parser.add_argument("--settings", nargs="+", default=("512", "2048", "4096", "16384", FIELD))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--without-checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=10, help="timed, after the warm-up")
    parser.add_argument("--detail", nargs="*", default=(), help="settings whose largest kernels are printed")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args()
    table = Table(options.csv)
    for experts, contender in itertools.product(options.experts, options.contender):
        if contender == GROUPED and experts != "bf16":
            continue
        checkpointing = not options.without_checkpointing
        model = build(contender, experts, checkpointing, options)
        for setting in options.settings:
            mode = f"LoRA, experts in {experts}" + ", checkpointing" * checkpointing
            columns = MODEL, f"{options.layers},{setting}", contender, mode, "autocast"
            record(table, columns, partial(measure, model, setting, options))
            table.write()
        del model
        release()


if __name__ == "__main__":
    main()
