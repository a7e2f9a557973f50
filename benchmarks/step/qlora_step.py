"""Training steps of whole models with QLoRA: peak memory under a card's limit, and milliseconds beside bf16 LoRA.

    python -m benchmarks.step.qlora_step [--case NAME ...] [--cap GIB] [--no-liger] [--csv FILE]

Random weights under the limit, experts packed from the start and linear layers quantized one by one; random tokens in
sequences of at most 4,096; r = 8, gradient checkpointing, bf16 autocast, adapters and fused AdamW in fp32, embeddings
in bf16, Liger's kernels with its loss in chunks. Qwen3's experts are NF4 (or INT4 in groups of 32) and its
attention's linear layers bitsandbytes' NF4 ("bf16 attention": they stay); gpt-oss's experts are MXFP4 and the rest
bf16, as on the hub. A step is forward, backward, optimiser, and zero_grad. The peak is that of the whole run,
building the model included. Capped cases run on the Triton backend, as a consumer card does; the others on the one
that is chosen. --device cpu --tiny checks the script.
"""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

import torch

from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.common.timing import release, waited_times
from benchmarks.step.models import MODELS
from benchmarks.step.run import Run, build_prepared, check
from benchmarks.step.training import GIB, WARMUP, WHOLE_ATTENTION, check_learning, one_step, optimizer_of, sequences
from sonicmoe_hf.layer.backends import BACKEND_VARIABLE

CARD_GIB = 24


class Case(NamedTuple):
    """A run, and whether the GPU's memory is capped to that of a card."""

    run: Run
    is_capped: bool


def case(
    model: str, tokens: int, experts: str | None, linear: str | None, mode: str = "LoRA", is_capped: bool = False
):
    """Make the case of a model with all its layers, experts and its attention's linear layers in these formats; None is
    bf16."""
    run = Run(model, MODELS[model].layers, tokens, mode, experts=experts, linear=linear, checkpointing=True)
    return Case(run._replace(rank=8, targets=WHOLE_ATTENTION), is_capped)


CASES = {
    "Qwen3-30B-A3B, experts and attention": case("Qwen3-30B-A3B", 2048, "nf4", "nf4", is_capped=True),
    "Qwen3-30B-A3B, attention alone": case("Qwen3-30B-A3B", 2048, "nf4", "nf4", "frozen", is_capped=True),
    "gpt-oss-20b, experts and attention": case("gpt-oss-20b", 2048, "mxfp4", None, is_capped=True),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA": case("Qwen3-30B-A3B", 16384, "nf4", "nf4"),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA, bf16 attention": case("Qwen3-30B-A3B", 16384, "nf4", None),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA of INT4, bf16 attention": case("Qwen3-30B-A3B", 16384, "int4", None),
    "Qwen3-30B-A3B, 16384 tokens, bf16 LoRA": case("Qwen3-30B-A3B", 16384, None, None),
}


def train(run: Run, options) -> dict:
    """Measure milliseconds of each step after the warm-up, the first loss, the last."""
    model = build_prepared(run, options)
    tokens = sequences(run.tokens, model.config.vocab_size, options.device)
    optimizer = optimizer_of(model)
    assert {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]} == {torch.float32}
    ms, losses = waited_times(lambda: one_step(model, optimizer, tokens), options.steps, WARMUP)
    first, last = check_learning(losses)
    return {"ms": ms, "loss_first": first, "loss_last": last}


def measure(table: Table, name: str, options) -> None:
    """Measure one case; running out of memory is a result."""
    (run, is_capped), on_gpu = CASES[name], options.device == "cuda"
    os.environ[BACKEND_VARIABLE] = options.backend or ("triton" if is_capped and on_gpu else "")
    attention = options.gpt_oss_attention if run.model == "gpt-oss-20b" else None
    run = run._replace(attention=attention, layers=options.layers or run.layers, tokens=options.tokens or run.tokens)
    check([run], options, autocast=True)
    release()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * GIB / total) if is_capped else 1.0)
    try:
        metrics = train(run, options)
    except torch.OutOfMemoryError:
        metrics = {"out_of_memory": 1}
    if on_gpu:
        metrics["peak_GiB"] = torch.cuda.max_memory_allocated() / GIB
        metrics["reserved_GiB"] = torch.cuda.max_memory_reserved() / GIB
    shape = f"{CASES[name].run.tokens} tokens" + (f", cap {options.cap} GiB" if is_capped else "")
    table.add(run.model, shape, name, "Liger" if options.liger else "", "eager", metrics)
    release()


def main() -> None:
    parser = Command(__doc__, "qlora_step.csv", "--device cpu --tiny")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--cap", type=float, default=CARD_GIB, help="GiB of the card that capped cases stand for")
    parser.add_argument("--backend", help="in place of Triton in capped cases, and of the one chosen in others")
    parser.add_argument(
        "--gpt-oss-attention",
        help="its attn_implementation, as it has no sdpa; default: flex_attention, eager on a CPU",
    )
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU")
    parser.add_argument("--steps", type=int, default=5, help="timed, after the warm-up")
    parser.add_argument("--layers", type=int, help="in place of the model's own")
    parser.add_argument("--tokens", type=int, help="in place of the case's own")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check the script")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.liger = on_gpu if options.liger is None else options.liger
    options.gpt_oss_attention = options.gpt_oss_attention or ("flex_attention" if on_gpu else "eager")
    table = Table(options.csv)
    for name in options.case or CASES:
        measure(table, name, options)
        table.write()


if __name__ == "__main__":
    main()
