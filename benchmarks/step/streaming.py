"""Training steps with experts in host memory: milliseconds and peak memory.

    python -m benchmarks.step.streaming [--part NAME ...] [--csv FILE]

bandwidth  GB/s from pinned host memory; seconds to pin a GiB
qwen3      Qwen3-30B-A3B, NF4 experts, 16,384 tokens a step: all experts on the GPU, 4 GiB of them, none
few        the same at 2,048 tokens, and forwards of 1 to 64 tokens
gpt_oss    gpt-oss-120b's sizes, MXFP4 experts in host memory, 2,048 tokens, under a cap of 24 GiB of GPU memory

Random packed bytes, random tokens in sequences of at most 4,096, LoRA with r = 8 on experts and attention in fp32, fused
AdamW, gradient checkpointing, bf16 autocast, Liger's kernels where they are installed. A step is forward, backward,
optimiser, zero_grad. Rows of other parts that the CSV has stay in it. --device cpu --tiny checks the script.
"""

from __future__ import annotations

import argparse
import importlib.util
import time

import torch

import sonicmoe_hf
from benchmarks.common.command import Command
from benchmarks.common.table import Table
from benchmarks.common.timing import release, synchronize, waited_times
from benchmarks.step.models import MODELS
from benchmarks.step.run import Run, build_base, prepare
from benchmarks.step.training import GIB, WARMUP, WHOLE_ATTENTION, check_learning, one_step, optimizer_of, sequences
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.streaming.copies import copies_to, page_aligned

QWEN3, GPT_OSS = "Qwen3-30B-A3B", "gpt-oss-120b"
FEW = (1, 8, 12, 16, 64)  # tokens; kernels read those of up to 12 over the bus
CAP_GIB = 24
TINY_LAYERS = 5
EVERYTHING = 2**50
SETTINGS = {"all on the GPU": EVERYTHING, "4 GiB on the GPU": "4GiB", "none on the GPU": 0}  # experts_memory


def run_of(name: str, options) -> Run:
    """Make the run of a model with packed experts and all its layers."""
    layers = TINY_LAYERS if options.tiny else MODELS[name].layers
    run = Run(name, layers, 0, "LoRA", experts=MODELS[name].packed, checkpointing=True)
    return run._replace(rank=8, targets=WHOLE_ATTENTION)


def draw_tokens(model, count: int, device) -> torch.Tensor:
    """Draw random tokens of the model's vocabulary."""
    return sequences(count, model.config.vocab_size, device)


def add_steps(table: Table, name: str, contender: str, model, optimizer, tokens, count: int) -> None:
    """Add rows of training steps."""
    release()
    ms, losses = waited_times(lambda: one_step(model, optimizer, tokens), count, WARMUP)
    check_learning(losses)
    metrics = {"ms": ms, "tokens_per_s": [1e3 * tokens.numel() / each for each in ms]}
    if tokens.is_cuda:
        metrics |= {
            "between_steps_GiB": torch.cuda.memory_allocated() / GIB,  # weights, buffers, adapters and Adam's state
            "peak_GiB": torch.cuda.max_memory_allocated() / GIB,
            "reserved_GiB": torch.cuda.max_memory_reserved() / GIB,
        }
    table.add(name, f"{tokens.numel()} tokens a step", contender, "", "eager", metrics)


def measure_copies(table: Table, options) -> None:
    """Measure the time of a copy to the GPU, and that of pinning its memory."""
    nbytes = 2**31 if options.device == "cuda" else 2**24
    copies, host = copies_to(torch.device(options.device)), page_aligned(nbytes)
    began = time.perf_counter()
    copies.pin(host)
    pinned = (time.perf_counter() - began) / (nbytes / GIB)
    host.fill_(1)
    target, done = copies.buffer(nbytes), copies.event()

    def copy():
        copies.copy([(target, host)], [], done)
        copies.wait(done)

    ms, _ = waited_times(copy, 10, WARMUP)
    rows = {"pin": {"s_per_GiB": pinned}, "copy": {"ms": ms, "GB_per_s": [nbytes / each / 1e6 for each in ms]}}
    for name, metrics in rows.items():
        table.add("copies", f"{nbytes / GIB:.2f} GiB", name, "", "eager", metrics)
    copies.finish()
    copies.unpin(host)


def measure_qwen3(table: Table, options) -> None:
    train_qwen3(table, options, 16384, SETTINGS)


def measure_few_tokens(table: Table, options) -> None:
    """Measure steps and forwards of few tokens."""
    names = ("all on the GPU", "none on the GPU")
    model = train_qwen3(table, options, 2048, names).eval()
    for name in reversed(names):
        sonicmoe_hf.patch_model(model, experts_memory=SETTINGS[name])
        for count in FEW:
            tokens = draw_tokens(model, count, options.device)
            with torch.no_grad(), torch.autocast(options.device, torch.bfloat16):
                call = lambda tokens=tokens: model(input_ids=tokens, use_cache=False).logits  # noqa: E731
                ms, _ = waited_times(call, 5, WARMUP)
            table.add(QWEN3, f"forward of {count} tokens", name, "", "eager", {"ms": ms})


def train_qwen3(table: Table, options, count: int, names):
    """Add rows of steps with each of these settings; return the model."""
    run = run_of(QWEN3, options)
    base = build_base(run, options)
    model = prepare(base, run)
    tokens = draw_tokens(model, 64 if options.tiny else count, options.device)
    optimizer = optimizer_of(model)
    for name in names:
        sonicmoe_hf.patch_model(base, experts_memory=SETTINGS[name])
        add_steps(table, QWEN3, name, model, optimizer, tokens, options.steps)
    return model


def measure_gpt_oss(table: Table, options) -> None:
    """Measure a model whose experts are all in host memory from the start."""
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * GIB / total))
    began, run = time.perf_counter(), run_of(GPT_OSS, options)
    if options.device == "cuda":
        run = run._replace(attention="torch_sinks")
    base = build_base(run, options, experts_memory=0)
    synchronize()
    shape, seconds = f"{base.config.num_hidden_layers} layers", time.perf_counter() - began
    host = sum(weight.nbytes for weight in base.parameters() if isinstance(weight, PackedWeight))
    table.add(GPT_OSS, shape, "built", "", "eager", {"s": seconds})
    table.add(GPT_OSS, shape, "experts in host memory", "", "eager", {"GiB": host / GIB})
    model, contender = prepare(base, run), "LoRA on experts and attention"
    tokens = draw_tokens(model, 64 if options.tiny else options.tokens, options.device)
    try:
        add_steps(table, GPT_OSS, contender, model, optimizer_of(model), tokens, min(3, options.steps))
    except torch.OutOfMemoryError:  # which is a result
        table.add(GPT_OSS, f"{tokens.numel()} tokens a step", contender, "", "eager", {"out_of_memory": 1})
    if options.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


PARTS = {
    "bandwidth": measure_copies,
    "qwen3": measure_qwen3,
    "few": measure_few_tokens,
    "gpt_oss": measure_gpt_oss,
}


def main() -> None:
    parser = Command(__doc__, "streaming.csv", "--device cpu --tiny")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: bandwidth and qwen3")
    parser.add_argument("--cap", type=float, default=CAP_GIB, help="GiB of GPU memory for gpt_oss")
    parser.add_argument("--steps", type=int, default=5, help="timed, after the warm-up")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step of gpt_oss")
    parser.add_argument(
        "--liger", action=argparse.BooleanOptionalAction, default=None, help="default: where installed"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check the script")
    options = parser.parse_args()
    if options.liger is None:
        options.liger = options.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    table = Table(options.csv)
    for name in options.part or ("bandwidth", "qwen3"):
        PARTS[name](table, options)
        table.write()
        release()


if __name__ == "__main__":
    main()
