"""Training steps of a whole Qwen3-30B-A3B with LoRA: milliseconds and peak memory, ours and PEFT over grouped_mm.

    python -m benchmarks.step.lora_step [--row LAYERS,TOKENS,plain|checkpointing ...] [--case NAME ...] [--liger]
        [--csv FILE]

Random weights made on the GPU in bf16 from the model's config, random tokens in sequences of 4,096, r = 16 on experts and
on q and v ("frozen": on q and v alone), adapters and fused AdamW in fp32, bf16 autocast as the Trainer's. A step is
forward, backward, optimiser, and zero_grad. Rows of the same number of layers share a model. Ours with LoRA and with
frozen experts take a step in turn, on two models that share the base: at 4,096 tokens a step waits for the host, whose
speed varies. --liger: Liger's RMSNorm, RoPE and fused linear cross entropy in every case. --device cpu --tiny checks the
script.
"""

from __future__ import annotations

import argparse
import copy
import itertools

import torch

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.common.timing import release
from benchmarks.step import models
from benchmarks.step.models import OURS
from benchmarks.step.run import Run, build_base, check, prepare
from benchmarks.step.training import WARMUP, sequences, time_in_turn

MODEL = "Qwen3-30B-A3B"
FORMS = ("plain", "checkpointing")
ROWS = ("48,4096,plain", "48,16384,checkpointing", "4,16384,plain", "4,16384,checkpointing")
FULL_LAYERS = 8  # 12 GB a layer
CASES = {  # who computes the experts, and what is trained
    "LoRA on experts, sonicmoe-hf": (OURS, "LoRA"),
    "PEFT over grouped_mm": ("grouped_mm", "LoRA"),
    "experts frozen, sonicmoe-hf": (OURS, "frozen"),
    "experts frozen, grouped_mm": ("grouped_mm", "frozen"),
    "full, sonicmoe-hf": (OURS, "full"),  # of few layers: weights, gradients and Adam in bf16
}


def row_of(text: str) -> str:
    """Parse the option of a row."""
    layers, tokens, form = text.split(",")
    if form not in FORMS or not (layers + tokens).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERS,TOKENS,plain or LAYERS,TOKENS,checkpointing")
    return text


def run_of(name: str, row: str) -> Run:
    """Make the run of a case in a row."""
    (contender, mode), (layers, tokens, form) = CASES[name], row.split(",")
    return Run(MODEL, int(layers), int(tokens), mode, contender, checkpointing=form == "checkpointing")


def group_cases(names: list[str]) -> list[list[str]]:
    """Group the cases whose steps are taken in turn."""
    in_turn = [name for name in names if CASES[name] in ((OURS, "LoRA"), (OURS, "frozen"))]
    return [group for group in (in_turn, *([name] for name in names if name not in in_turn)) if group]


def copy_sharing_weights(base):
    """Copy the modules, with the same parameters and buffers."""
    return copy.deepcopy(base, {id(tensor): tensor for tensor in itertools.chain(base.parameters(), base.buffers())})


def measure(table: Table, base, row: str, names: list[str], options) -> None:
    """Measure cases in turn in one row. The base is bare again afterwards."""
    runs = [run_of(name, row) for name in names]
    adapted = [prepare(each, run) for each, run in zip([base, *(copy_sharing_weights(base) for _ in runs[1:])], runs)]
    try:
        batch = sequences(runs[0].tokens, base.config.vocab_size, options.device)
        steps = time_in_turn(adapted, [batch] * (WARMUP + options.steps))
    except torch.OutOfMemoryError:  # which is a result
        metrics = [{"out_of_memory": 1} for _ in names]
    else:
        metrics = [{"ms": step.milliseconds, "peak_GiB": step.peak_GiB} for step in steps]
        if len(steps) > 1:
            ours, frozen = (step.milliseconds for step in steps)
            metrics[0]["ratio_to_frozen"] = [first / second for first, second in zip(ours, frozen)]
    for name, values in zip(names, metrics):
        table.add(MODEL, row, name, ", ".join(models.settings_of(MODEL, options)), "eager", values)
    if runs[0].checkpointing:
        adapted[0].gradient_checkpointing_disable()
    if runs[0].mode != "full":
        adapted[0].unload()
    base.zero_grad(set_to_none=True)
    if runs[0].is_ours:
        sonicmoe_hf.unpatch_model(base)
    del adapted
    release()


def main() -> None:
    parser = Command(__doc__, "lora_step.csv", "--device cpu --tiny --row 2,64,plain")
    parser.add_argument("--row", action="append", type=row_of, help=f"default: {'; '.join(ROWS)}")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    models.add_settings(parser)
    parser.add_argument("--steps", type=int, default=5, help="timed, after the warm-up")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    options = parser.parse_args()
    # in the order of CASES, whatever that of --case: the ratio is of LoRA to frozen
    names = [name for name in CASES if name in (options.case or CASES)]
    asked = options.row or ROWS
    for mode in dict.fromkeys(CASES[name][1] for name in names):
        check([run_of(name, asked[0]) for name in names if CASES[name][1] == mode], options, autocast=True)
    table = Table(options.csv)
    for layers, rows in itertools.groupby(asked, lambda row: int(row.split(",")[0])):
        model = build_base(Run(MODEL, layers, 0, "LoRA"), options)
        fitting = [name for name in names if CASES[name][1] != "full" or layers <= FULL_LAYERS]
        for row, group in itertools.product(rows, group_cases(fitting)):
            measure(table, model, row, group, options)
            table.write()
        del model


if __name__ == "__main__":
    main()
