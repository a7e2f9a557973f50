"""Training steps of a whole Qwen3-30B-A3B with LoRA: milliseconds and peak memory, ours and PEFT over grouped_mm.

    python benchmarks/lora_step.py [--row LAYERS,TOKENS,plain|checkpointing ...] [--case NAME ...] [--liger] [--csv FILE]

Random weights made on the GPU in bf16 from the model's config, random tokens in sequences of 4,096, r = 16 on experts and
on q and v ("frozen": on q and v alone), adapters and fused AdamW in fp32, bf16 autocast as the Trainer's. A step is
forward, backward, optimiser, and zero_grad. Rows of the same number of layers share a model. --liger: Liger's RMSNorm,
RoPE and fused linear cross entropy in every case. For two GPUs start two processes, each with its CUDA_VISIBLE_DEVICES,
--row or --case, and --csv. --device cpu --tiny checks the script.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import NamedTuple

import models
import torch
from moe_layer import Table
from training import WARMUP, adapted, sequences, timed_steps

import sonicmoe_hf

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


def measure(table, base, row: Row, name: str, options):
    """One case in one row; running out of memory is a result."""
    case = CASES[name]

    def add(metric, values):
        table.add(MODEL, row, name, ", ".join(models.settings_of(options)), "eager", metric, values)

    if case.ours:
        sonicmoe_hf.patch_model(base)
    model = adapted(base, case.trained)
    if row.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        tokens = sequences(row.tokens, base.config.vocab_size, options.device)
        times, _, peak, loss = timed_steps(model, [tokens] * (WARMUP + options.steps))
    except torch.OutOfMemoryError:
        add("out_of_memory", [1])
        print(f"{row!s:24s} {name:30s} out of memory", flush=True)
    else:
        add("ms", times)
        add("peak_GiB", [peak])
        print(
            f"{row!s:24s} {name:30s} {torch.tensor(times).median():9.1f} ms  {peak:6.1f} GiB  loss {loss:.3f}",
            flush=True,
        )
    restore(base, model, case, row)


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
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "lora_step.csv")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; --device cpu --tiny --row 2,64,plain checks the script")
    rows = [row._replace(layers=options.layers or row.layers) for row in options.row or ROWS]
    table = Table()
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    for layers in dict.fromkeys(row.layers for row in rows):
        model = build(layers, options)
        for row in (row for row in rows if row.layers == layers):
            for name in options.case or CASES:
                if CASES[name].trained == "full" and layers > FULL_LAYERS:
                    continue
                measure(table, model, row, name, options)
                table.write(options.csv)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
