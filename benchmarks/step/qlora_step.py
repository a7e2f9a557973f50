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
import gc
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from peft import get_peft_model

import sonicmoe_hf
from benchmarks.common.paths import RESULTS
from benchmarks.common.table import Table
from benchmarks.step import checking
from benchmarks.step.models import MODELS, apply_liger, config_of
from benchmarks.step.training import one_step, optimizer_of
from sonicmoe_hf.demo.model import random_packed_model
from sonicmoe_hf.layer.backends import VARIABLE

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANK, SEQUENCE, WARMUP = 8, 4096, 2
CARD_GIB = 24


class Case(NamedTuple):
    """model: one of models.py. tokens: of a step. experts, attention: the format of their weights, or "bf16".
    trains_experts: whether they have adapters. goal_gib: of the peak, for capped cases."""

    model: str
    tokens: int
    experts: str
    attention: str
    trains_experts: bool = True
    goal_gib: float | None = None


CASES = {
    "Qwen3-30B-A3B, experts and attention": Case("Qwen3-30B-A3B", 2048, "nf4", "nf4", goal_gib=22.5),
    "Qwen3-30B-A3B, attention alone": Case("Qwen3-30B-A3B", 2048, "nf4", "nf4", False, 18.0),
    "gpt-oss-20b, experts and attention": Case("gpt-oss-20b", 2048, "mxfp4", "bf16", goal_gib=17.0),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA": Case("Qwen3-30B-A3B", 16384, "nf4", "nf4"),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA, bf16 attention": Case("Qwen3-30B-A3B", 16384, "nf4", "bf16"),
    "Qwen3-30B-A3B, 16384 tokens, bf16 LoRA": Case("Qwen3-30B-A3B", 16384, "bf16", "bf16"),
}


def build(case: Case, options):
    """The model with random weights, quantized, on the device; never more than one weight of it still to be quantized."""
    experts, linear = (None if weights == "bf16" else weights for weights in (case.experts, case.attention))
    attention = options.gpt_oss_attention if case.model == "gpt-oss-20b" else "sdpa"
    config = config_of(case.model, options.layers or MODELS[case.model].layers, options.tiny)
    model = random_packed_model(
        config, experts, linear, options.device, dtype=torch.bfloat16, attn_implementation=attention
    )
    if options.liger:
        apply_liger(case.model, model)
    return model.train().requires_grad_(False)


def adapted(model, case: Case, device):
    """The model with adapters."""
    parameters = {} if case.trains_experts else {"target_parameters": []}
    adapters = sonicmoe_hf.lora_config(model, RANK, target_modules=ATTENTION, **parameters)
    with torch.device(device):  # PEFT initialises them where new tensors are made
        return get_peft_model(model, adapters)


def trained(model, case: Case, device):
    """The model with adapters, checkpointing and our kernels."""
    sonicmoe_hf.patch_model(model)
    model = adapted(model, case, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(case: Case, options):
    """(milliseconds of each step after the warm-up, the first loss, the last)."""
    torch.manual_seed(0)
    model = trained(build(case, options), case, options.device)
    count = options.tokens or case.tokens
    length = min(SEQUENCE, count)
    tokens = torch.randint(model.config.vocab_size, (count // length, length), device=options.device)
    optimizer = optimizer_of(model)
    assert {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]} == {torch.float32}
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    times, losses = [], []
    for _ in range(WARMUP + options.steps):
        synchronize()
        began = time.perf_counter()
        losses.append(one_step(model, optimizer, tokens))
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    losses = torch.stack(losses).tolist()
    if not losses[-1] < losses[0]:
        raise SystemExit(f"the loss on one batch went from {losses[0]} to {losses[-1]}: it does not train")
    return times[WARMUP:], losses[0], losses[-1]


def check(case: Case, options):
    """Gradients of a tiny model of the case on the device; its linear layers stay in bf16."""
    tiny = argparse.Namespace(**vars(options) | {"tiny": True, "layers": checking.LAYERS, "liger": False})
    torch.manual_seed(0)
    adapt, train = (functools.partial(make, case=case, device=options.device) for make in (adapted, trained))
    checking.check(build(case._replace(attention="bf16"), tiny), adapt, {"sonicmoe-hf": train}, autocast=True)


def measure(table, name: str, options):
    """One case; running out of memory is a result."""
    case, on_gpu = CASES[name], options.device == "cuda"
    capped = case.goal_gib is not None
    os.environ[VARIABLE] = options.backend or ("triton" if capped and on_gpu else "")
    print(name, flush=True)
    check(case, options)
    release()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * 2**30 / total) if capped else 1.0)
        torch.cuda.reset_peak_memory_stats()

    def add(metric, values):
        mode = f"{case.tokens} tokens, cap {options.cap} GiB" if capped else f"{case.tokens} tokens"
        table.add(name.split(",")[0], mode, name, "Liger" if options.liger else "", "eager", metric, values)

    try:
        times, first, last = train(case, options)
    except torch.OutOfMemoryError as error:
        add("out_of_memory", [1])
        line = f"  out of memory: {str(error).splitlines()[0][:150]}"
    else:
        add("ms", times)
        add("loss_first", [first])
        add("loss_last", [last])
        line = f"  {torch.tensor(times).median():.1f} ms, loss {first:.3f} -> {last:.3f}"
    if on_gpu:
        peak, reserved = (
            value / 2**30 for value in (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        )
        add("peak_GiB", [peak])
        add("reserved_GiB", [reserved])
        line += f", peak {peak:.2f} GiB (reserved {reserved:.2f})"
        line += f", goal {case.goal_gib}: {'met' if peak <= case.goal_gib else 'MISSED'}" if capped else ""
    print(line, flush=True)
    release()
    return f"{name}:{line}"


def release():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check the script")
    parser.add_argument("--csv", type=Path, default=RESULTS / "qlora_step.csv")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.liger = on_gpu if options.liger is None else options.liger
    options.gpt_oss_attention = options.gpt_oss_attention or ("flex_attention" if on_gpu else "eager")
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; --device cpu --tiny checks the script")
    table = Table()
    lines = []
    for name in options.case or CASES:
        lines.append(measure(table, name, options))
        table.write(options.csv)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
