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
import time
from pathlib import Path
from typing import NamedTuple

import torch
from moe_layer import Table
from peft import get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import sonicmoe_hf

SIZES = {  # config.json of Qwen/Qwen3-30B-A3B
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
TINY = {
    "hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
RANK, SEQUENCE, WARMUP = 16, 4096, 2
ATTENTION = ["q_proj", "v_proj"]
LEARNING_RATE = 1e-4


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
    sizes = TINY if options.tiny else SIZES
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=layers, use_cache=False)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3_moe(swiglu=False, model=model)
    return model.train()


def adapted(model, case: Case):
    """The model as `case` trains it, on the same weights."""
    if case.trained == "full":
        return model.requires_grad_(True)
    parameters = {} if case.trained == "LoRA" else {"target_parameters": []}
    adapters = sonicmoe_hf.lora_config(model, RANK, target_modules=ATTENTION, **parameters)
    with torch.device(next(model.parameters()).device):  # PEFT initialises them where new tensors are made
        return get_peft_model(model, adapters)


def one_step(model, optimizer, tokens, device):
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def timed_steps(model, row: Row, options):
    """(milliseconds of each step after the warm-up, GiB at the peak, the last loss)."""
    length = min(SEQUENCE, row.tokens)
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (row.tokens // length, length), device=options.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    times = []
    for number in range(WARMUP + options.steps):
        if number == 1 and options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # what the first step compiles is left out, the optimiser's state is in
        synchronize()
        began = time.perf_counter()
        loss = one_step(model, optimizer, tokens, options.device)
        synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else float("nan")
    return times[WARMUP:], peak, loss.item()


def measure(table, base, row: Row, name: str, options):
    """One case in one row; running out of memory is a result."""
    case = CASES[name]

    def add(metric, values):
        table.add("Qwen3-30B-A3B", row, name, "Liger" if options.liger else "", "eager", metric, values)

    if case.ours:
        sonicmoe_hf.patch_model(base)
    model = adapted(base, case)
    if row.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        times, peak, loss = timed_steps(model, row, options)
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
    parser.add_argument("--liger", action="store_true", help="Liger's kernels for the rest of the model")
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
