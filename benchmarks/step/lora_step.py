"""Training steps of a whole Qwen3-30B-A3B with LoRA: milliseconds and peak memory, ours and PEFT over grouped_mm.

    python -m benchmarks.step.lora_step [--row LAYERS,TOKENS,plain|checkpointing ...] [--case NAME ...] [--liger]
        [--csv FILE]

Random weights made on the GPU in bf16 from the model's config, random tokens in sequences of 4,096, r = 16 on experts and
on q and v ("frozen": on q and v alone), adapters and fused AdamW in fp32, bf16 autocast as the Trainer's. A step is
forward, backward, optimiser, and zero_grad. Rows of the same number of layers share a model. Ours with LoRA and with
frozen experts take a step in turn, on two models that share the base: at 4,096 tokens a step waits for the host, whose
speed varies. --liger: Liger's RMSNorm, RoPE and fused linear cross entropy in every case. For two GPUs start two
processes, each with its CUDA_VISIBLE_DEVICES, --row or --case, and --csv. --device cpu --tiny checks the script.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import itertools
from pathlib import Path
from typing import NamedTuple

import torch

import sonicmoe_hf
from benchmarks.common.paths import RESULTS
from benchmarks.common.table import Table
from benchmarks.step import checking, models
from benchmarks.step.training import WARMUP, adapted, sequences, timed_in_turn

MODEL = "Qwen3-30B-A3B"


class Row(NamedTuple):
    """layers, tokens a step, gradient checkpointing."""

    layers: int
    tokens: int
    checkpointing: bool

    def __str__(self):
        return f"{self.layers},{self.tokens},{'checkpointing' if self.checkpointing else 'plain'}"

    @classmethod
    def parse(cls, text: str) -> Row:
        layers, tokens, mode = text.split(",")
        if mode not in ("plain", "checkpointing"):
            raise argparse.ArgumentTypeError(f"{text!r} is not LAYERS,TOKENS,plain or LAYERS,TOKENS,checkpointing")
        return cls(int(layers), int(tokens), mode == "checkpointing")


class Case(NamedTuple):
    """Whether our kernels compute the experts, and what is trained: "LoRA", "frozen" or "full"."""

    ours: bool
    trained: str


ROWS = [Row(48, 4096, False), Row(48, 16384, True), Row(4, 16384, False), Row(4, 16384, True)]
CASES = {
    "LoRA on experts, sonicmoe-hf": Case(True, "LoRA"),
    "PEFT over grouped_mm": Case(False, "LoRA"),
    "experts frozen, sonicmoe-hf": Case(True, "frozen"),
    "experts frozen, grouped_mm": Case(False, "frozen"),
    "full, sonicmoe-hf": Case(True, "full"),  # of few layers: weights, gradients and Adam in bf16
}
FULL_LAYERS = 8  # 12 GB a layer


def build(layers: int, options):
    """The model with random weights on the device, in bf16; Transformers' grouped_mm computes its experts."""
    model = models.build(MODEL, layers, device=options.device, tiny=options.tiny)
    models.apply_settings(MODEL, model, options)
    return model


def check(names: list[str], options):
    """Gradients of tiny models of the cases."""
    for mode in dict.fromkeys(CASES[name].trained for name in names):
        finish = functools.partial(adapted, trained=mode)

        def ours(model, finish=finish):
            sonicmoe_hf.patch_model(model)
            return finish(model)

        others = {name: ours if CASES[name].ours else finish for name in names if CASES[name].trained == mode}
        tiny = models.build(MODEL, checking.LAYERS, device=options.device, tiny=True)
        checking.check(tiny, finish, others, autocast=True)


def groups(names):
    """The cases whose steps are taken in turn."""
    in_turn = [name for name in names if CASES[name].ours and CASES[name].trained != "full"]
    return [group for group in (in_turn, *([name] for name in names if name not in in_turn)) if group]


def sharing_weights(base):
    """A copy of the modules, with the same parameters and buffers."""
    return copy.deepcopy(base, {id(tensor): tensor for tensor in itertools.chain(base.parameters(), base.buffers())})


def measure(table, base, row: Row, names: list[str], options):
    """Cases in turn in one row; running out of memory is a result."""

    def add(name, metric, values):
        table.add(MODEL, row, name, ", ".join(models.settings_of(MODEL, options)), "eager", metric, values)

    cases = [CASES[name] for name in names]
    if cases[0].ours:
        sonicmoe_hf.patch_model(base)
    bases = [base, *(sharing_weights(base) for _ in cases[1:])]
    trained = [adapted(each, case.trained) for each, case in zip(bases, cases)]
    if row.checkpointing:
        for model in trained:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        tokens = sequences(row.tokens, base.config.vocab_size, options.device)
        found = timed_in_turn(trained, [tokens] * (WARMUP + options.steps))
    except torch.OutOfMemoryError:
        for name in names:
            add(name, "out_of_memory", [1])
            print(f"{row!s:24s} {name:30s} out of memory", flush=True)
    else:
        for name, measured in zip(names, found):
            add(name, "ms", measured.milliseconds)
            add(name, "peak_GiB", [measured.peak_GiB])
            print(
                f"{row!s:24s} {name:30s} {torch.tensor(measured.milliseconds).median():9.1f} ms  "
                f"{measured.peak_GiB:6.1f} GiB  loss {measured.loss:.3f}",
                flush=True,
            )
        if len(found) > 1:
            ratios = [first / second for first, second in zip(found[0].milliseconds, found[1].milliseconds)]
            add(names[0], "ratio_to_frozen", ratios)
            print(f"{'':24s} {names[0]} / frozen: {torch.tensor(ratios).median():.3f}", flush=True)
    restore(base, trained[0], cases[0], row)


def restore(base, model, case: Case, row: Row):
    """The bare model again, without gradients and the memory of the case."""
    if row.checkpointing:
        model.gradient_checkpointing_disable()
    if case.trained != "full":
        model.unload()
    base.zero_grad(set_to_none=True)
    if case.ours:
        sonicmoe_hf.unpatch_model(base)
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", type=Row.parse, help=f"default: {'; '.join(map(str, ROWS))}")
    parser.add_argument("--layers", type=int, help="in place of every row's own")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    models.add_settings(parser)
    parser.add_argument("--steps", type=int, default=5, help="timed, after the warm-up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    parser.add_argument("--csv", type=Path, default=RESULTS / "lora_step.csv")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; --device cpu --tiny --row 2,64,plain checks the script")
    rows = [row._replace(layers=options.layers or row.layers) for row in options.row or ROWS]
    check(options.case or list(CASES), options)
    table = Table()
    for layers in dict.fromkeys(row.layers for row in rows):
        model = build(layers, options)
        for row in (row for row in rows if row.layers == layers):
            # in the order of CASES, whatever that of --case: the ratio is of LoRA to frozen
            names = [name for name in CASES if name in (options.case or CASES)]
            for group in groups([name for name in names if CASES[name].trained != "full" or layers <= FULL_LAYERS]):
                measure(table, model, row, group, options)
                table.write(options.csv)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
