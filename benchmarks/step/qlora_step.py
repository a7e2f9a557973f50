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
import copy
import gc
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from peft import get_peft_model
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig

import sonicmoe_hf
from benchmarks.common.paths import RESULTS
from benchmarks.common.table import Table
from benchmarks.step.models import MODELS
from benchmarks.step.training import one_step
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.demo.model import random_packed_model
from sonicmoe_hf.layer.backends import VARIABLE

GPT_OSS = {  # config.json of openai/gpt-oss-20b; what it leaves out are the defaults
    "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
RANK, SEQUENCE, WARMUP, LEARNING_RATE = 8, 4096, 2, 1e-4
CARD_GIB = 24
MAX_ERROR = 0.05  # of a gradient in bf16 against the dequantized weights', in another order of sums


class Case(NamedTuple):
    """model: "qwen3" or "gpt_oss". tokens: of a step. experts, attention: the format of their weights, or "bf16".
    trains_experts: whether they have adapters. goal_gib: of the peak, for capped cases."""

    model: str
    tokens: int
    experts: str
    attention: str
    trains_experts: bool = True
    goal_gib: float | None = None


CASES = {
    "Qwen3-30B-A3B, experts and attention": Case("qwen3", 2048, "nf4", "nf4", goal_gib=22.5),
    "Qwen3-30B-A3B, attention alone": Case("qwen3", 2048, "nf4", "nf4", False, 18.0),
    "gpt-oss-20b, experts and attention": Case("gpt_oss", 2048, "mxfp4", "bf16", goal_gib=17.0),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA": Case("qwen3", 16384, "nf4", "nf4"),
    "Qwen3-30B-A3B, 16384 tokens, QLoRA, bf16 attention": Case("qwen3", 16384, "nf4", "bf16"),
    "Qwen3-30B-A3B, 16384 tokens, bf16 LoRA": Case("qwen3", 16384, "bf16", "bf16"),
}


def config_of(case: Case, options):
    sizes = {"qwen3": MODELS["Qwen3-30B-A3B"].sizes, "gpt_oss": GPT_OSS}[case.model] | {"use_cache": False}
    if options.tiny:
        sizes = {name: TINY.get(name, value) for name, value in sizes.items() if name != "rope_parameters"}
    if options.layers:
        sizes["num_hidden_layers"] = options.layers
    return {"qwen3": Qwen3MoeConfig, "gpt_oss": GptOssConfig}[case.model](**sizes)


def build(case: Case, options):
    """The model with random weights, quantized, on the device; never more than one weight of it still to be quantized."""
    experts, linear = (None if weights == "bf16" else weights for weights in (case.experts, case.attention))
    attention = options.gpt_oss_attention if case.model == "gpt_oss" else "sdpa"
    model = random_packed_model(
        config_of(case, options), experts, linear, options.device, dtype=torch.bfloat16, attn_implementation=attention
    )
    if options.liger:
        apply_liger(model, case)
    return model.train().requires_grad_(False)


def apply_liger(model, case: Case):
    from liger_kernel.transformers import apply_liger_kernel_to_gpt_oss, apply_liger_kernel_to_qwen3_moe

    apply = {"qwen3": apply_liger_kernel_to_qwen3_moe, "gpt_oss": apply_liger_kernel_to_gpt_oss}[case.model]
    apply(swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True, model=model)


def adapted(model, case: Case, device):
    """The model with adapters, checkpointing and our kernels."""
    sonicmoe_hf.patch_model(model)
    parameters = {} if case.trains_experts else {"target_parameters": []}
    adapters = sonicmoe_hf.lora_config(model, RANK, target_modules=ATTENTION, **parameters)
    with torch.device(device):  # PEFT initialises them where new tensors are made
        model = get_peft_model(model, adapters)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(case: Case, options):
    """(milliseconds of each step after the warm-up, the first loss, the last)."""
    torch.manual_seed(0)
    model = adapted(build(case, options), case, options.device)
    count = options.tokens or case.tokens
    length = min(SEQUENCE, count)
    tokens = torch.randint(model.config.vocab_size, (count // length, length), device=options.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
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
    """Gradients of a tiny model of the case on the device, beside those over its dequantized experts."""
    tiny = argparse.Namespace(**{**vars(options), "tiny": True, "layers": None, "liger": False})
    torch.manual_seed(0)
    packed = build(case, tiny)
    dense = copy.deepcopy(packed)
    for module in dense.modules():
        for name, weight in list(module._parameters.items()):
            if isinstance(weight, PackedWeight):
                module._parameters[name] = nn.Parameter(weight.dequantize(), requires_grad=False)
    tokens = torch.randint(packed.config.vocab_size, (1, 256), device=options.device)
    found = []
    for model in (packed, dense):
        torch.manual_seed(1)
        model = adapted(model, case, options.device)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
        with torch.autocast(options.device, torch.bfloat16):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    actual, expected = found
    errors = {name: ((actual[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}
    worst = max(errors, key=errors.get)
    print(f"  gradients of a tiny model: largest error {errors[worst]:.4f} ({worst})", flush=True)
    if not errors[worst] < MAX_ERROR:
        raise SystemExit("packed and dequantized experts disagree")


def measure(table, name: str, options):
    """One case; running out of memory is a result."""
    case, on_gpu = CASES[name], options.device == "cuda"
    capped = case.goal_gib is not None
    os.environ[VARIABLE] = options.backend or ("triton" if capped and on_gpu else "")
    print(name, flush=True)
    if case.experts != "bf16":
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
