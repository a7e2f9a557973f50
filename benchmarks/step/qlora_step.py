"""Training steps of whole models with QLoRA: peak memory under a card's limit, and milliseconds beside bf16 LoRA.

    python -m benchmarks.step.qlora_step [--case NAME ...] [--cap GIB] [--no-liger] [--csv FILE]

Random weights under the limit, experts packed from the start and linear layers quantized one by one; random tokens in
sequences of at most 4,096; r = 8, gradient checkpointing, bf16 autocast, adapters and fused AdamW in fp32, embeddings in
bf16, Liger's kernels with its loss in chunks. Qwen3's experts are NF4 and its attention's linear layers bitsandbytes' NF4
("bf16 attention": they stay); gpt-oss's experts are MXFP4 and the rest bf16, as on the hub. A step is forward, backward,
optimiser, and zero_grad. The peak is that of the whole run, building the model included. Capped cases run on the Triton
backend, as a consumer card does; the others on the one that is chosen. --device cpu --tiny checks the script.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import NamedTuple

import torch

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.common.timing import release, waited_times
from benchmarks.step import checking
from benchmarks.step.models import MODELS, build
from benchmarks.step.training import GIB, WARMUP, WHOLE_ATTENTION, adapted, learned, one_step, optimizer_of, sequences
from sonicmoe_hf.layer.backends import VARIABLE

RANK = 8
CARD_GIB = 24


class Case(NamedTuple):
    """model: one of models.py. tokens: of a step. experts, attention: the format of their weights, None for bf16.
    trained: what has adapters, as `adapted` takes it. is_capped: to the memory of a card."""

    model: str
    tokens: int
    experts: str | None
    attention: str | None
    trained: str = "LoRA"
    is_capped: bool = False


CASES = {
    "Qwen3-30B-A3B, experts and attention": Case("Qwen3-30B-A3B", 2048, "nf4", "nf4", is_capped=True),
    "Qwen3-30B-A3B, attention alone": Case("Qwen3-30B-A3B", 2048, "nf4", "nf4", "frozen", is_capped=True),
    "gpt-oss-20b, experts and attention": Case("gpt-oss-20b", 2048, "mxfp4", None, is_capped=True),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA": Case("Qwen3-30B-A3B", 16384, "nf4", "nf4"),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA, bf16 attention": Case("Qwen3-30B-A3B", 16384, "nf4", None),
    "Qwen3-30B-A3B, 16384 tokens, bf16 LoRA": Case("Qwen3-30B-A3B", 16384, None, None),
}


def built(case: Case, options):
    """The frozen model, quantized, on the device; never more than one weight of it still to be quantized."""
    attention = options.gpt_oss_attention if case.model == "gpt-oss-20b" else None
    packed = {"experts": case.experts, "linear": case.attention}
    model = build(case.model, options.layers or MODELS[case.model].layers, options, attention=attention, packed=packed)
    return model.requires_grad_(False)


def trained(model, case: Case):
    """The model with adapters, checkpointing and our kernels."""
    sonicmoe_hf.patch_model(model)
    model = adapted(model, case.trained, RANK, WHOLE_ATTENTION)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(case: Case, options) -> dict:
    """Milliseconds of each step after the warm-up, the first loss, the last."""
    model = trained(built(case, options), case)
    tokens = sequences(options.tokens or case.tokens, model.config.vocab_size, options.device)
    optimizer = optimizer_of(model)
    assert {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]} == {torch.float32}
    ms, losses = waited_times(lambda: one_step(model, optimizer, tokens), options.steps, WARMUP)
    first, last = learned(losses)
    return {"ms": ms, "loss_first": first, "loss_last": last}


def check(case: Case, options) -> None:
    """Gradients of a tiny model of the case on the device; its linear layers stay in bf16."""
    tiny = argparse.Namespace(**vars(options) | {"tiny": True, "layers": checking.LAYERS, "liger": False})
    adapt = functools.partial(adapted, trained=case.trained, rank=RANK, targets=WHOLE_ATTENTION)
    others = {"sonicmoe-hf": functools.partial(trained, case=case)}
    checking.check(built(case._replace(attention=None), tiny), adapt, others, autocast=True)


def measure(table: Table, name: str, options) -> None:
    """One case; running out of memory is a result."""
    case, on_gpu = CASES[name], options.device == "cuda"
    os.environ[VARIABLE] = options.backend or ("triton" if case.is_capped and on_gpu else "")
    check(case, options)
    release()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * GIB / total) if case.is_capped else 1.0)
    try:
        metrics = train(case, options)
    except torch.OutOfMemoryError:
        metrics = {"out_of_memory": 1}
    if on_gpu:
        metrics["peak_GiB"] = torch.cuda.max_memory_allocated() / GIB
        metrics["reserved_GiB"] = torch.cuda.max_memory_reserved() / GIB
    shape = f"{case.tokens} tokens, cap {options.cap} GiB" if case.is_capped else f"{case.tokens} tokens"
    table.add(case.model, shape, name, "Liger" if options.liger else "", "eager", metrics)
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
