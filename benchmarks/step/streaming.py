"""Training steps with experts in host memory: the same bits as resident ones, milliseconds, peak memory.

    python -m benchmarks.step.streaming [--part NAME ...] [--csv FILE]

check      a small model's output and gradients, streamed and resident, in every format and with both kinds of gradient
           checkpointing: equal to the bit, or the script ends
bandwidth  GB/s from pinned host memory; the copy beside matmuls that take as long; seconds to pin a GiB
qwen3      Qwen3-30B-A3B, NF4 experts, 16,384 tokens a step: all experts on the GPU, 4 GiB of them, none
few        the same at 2,048 tokens, steps of 8 and forwards of 1 to 64 tokens, and generation
layer      one layer of those few tokens: weights on the GPU, copied for each call, or read by the kernels over the bus
dense_layer  the same in bf16
gpt_oss    gpt-oss-120b's sizes, MXFP4 experts in host memory, 2,048 tokens, under a cap of 24 GiB of GPU memory
largest    Qwen3-235B-A22B's sizes, NF4 experts, as many of its layers as the host's free memory holds

Random packed bytes, random tokens in sequences of at most 4,096, LoRA with r = 8 on experts and attention in fp32, fused
AdamW, gradient checkpointing, bf16 autocast, Liger's kernels where they are installed. A step is forward, backward,
optimiser, zero_grad. Rows of other parts that the CSV has stay in it. --device cpu --tiny checks the script.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from pathlib import Path

import torch
from peft import get_peft_model
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig

import sonicmoe_hf
from benchmarks.common.paths import RESULTS
from benchmarks.common.table import Table
from benchmarks.step.models import MODELS, TINY
from benchmarks.step.qlora_step import ATTENTION, RANK, SEQUENCE
from benchmarks.step.training import LEARNING_RATE, one_step
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.demo.model import random_packed_model
from sonicmoe_hf.demo.random_bytes import random_packed
from sonicmoe_hf.kernels.quantized import Quantized
from sonicmoe_hf.streaming.copies import copies_to, page_aligned
from sonicmoe_hf.streaming.memory import free_on_host
from sonicmoe_hf.streaming.placement import bytes_of, expert_layers

WARMUP = 2
FEW = (1, 8, 12, 16, 64)  # tokens; kernels read those of up to 12 over the bus
GENERATED = 16
CAP_GIB = 24
# (format, reentrant checkpointing, or None without checkpointing)
QWEN3_CHECKS = (("nf4", None), ("nf4", True), ("nf4", False), ("fp8", False), ("nvfp4", False), (None, False))
GPT_OSS_CHECKS = (("mxfp4", False), (None, False))
LEFT_ON_HOST = 12 * 2**30
QWEN3_235B = {  # config.json of Qwen/Qwen3-235B-A22B, beside what the smaller one has too
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64,
}  # fmt: skip
GIB = 2**30


def config_of(name: str, options, **changes):
    """A model's config; tiny ones keep the architecture."""
    qwen3, gpt_oss = MODELS["Qwen3-30B-A3B"], MODELS["gpt-oss-20b"]
    sizes, layers = {
        "qwen3": (qwen3.sizes, qwen3.layers),
        "qwen3_235b": (qwen3.sizes | QWEN3_235B, QWEN3_235B["num_hidden_layers"]),
        "gpt_oss": (gpt_oss.sizes, gpt_oss.layers),
    }[name]
    sizes = {"num_hidden_layers": layers} | sizes | {"use_cache": False} | changes
    if options.tiny:
        sizes = {key: TINY.get(key, value) for key, value in sizes.items() if key != "rope_parameters"}
        sizes["num_hidden_layers"] = 5
    return (GptOssConfig if name == "gpt_oss" else Qwen3MoeConfig)(**sizes)


def build(config, format, options, experts_memory=None, attention="sdpa"):
    """A frozen model with random packed experts, on the device and in host memory as experts_memory says."""
    if isinstance(config, GptOssConfig) and attention == "sdpa":  # which it has not
        attention = "torch_sinks" if options.device == "cuda" else "eager"
    model = random_packed_model(
        config, format, None, options.device, dtype=torch.bfloat16, attn_implementation=attention,
        experts_memory=experts_memory,
    )  # fmt: skip
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_gpt_oss, apply_liger_kernel_to_qwen3_moe

        is_gpt_oss = isinstance(config, GptOssConfig)
        apply = apply_liger_kernel_to_gpt_oss if is_gpt_oss else apply_liger_kernel_to_qwen3_moe
        apply(swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True, model=model)
    sonicmoe_hf.patch_model(model)
    return model.train().requires_grad_(False)


def adapted(model, device, trains_experts=True):
    """The model with adapters and checkpointing."""
    parameters = {} if trains_experts else {"target_parameters": []}
    adapters = sonicmoe_hf.lora_config(model, RANK, target_modules=ATTENTION, **parameters)
    with torch.device(device):  # PEFT initialises them where new tensors are made
        model = get_peft_model(model, adapters)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def tokens_of(model, count: int, device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    length = min(SEQUENCE, count)
    return torch.randint(model.config.vocab_size, (count // length, length), generator=generator, device=device)


class Run:
    """One invocation: its options, and the rows that it writes."""

    def __init__(self, options):
        self.options, self.table, self.lines = options, Table(), []
        self.on_gpu = options.device == "cuda"

    def add(self, config, shape, contender, metric, values, mode=""):
        """A row of the CSV and of what is printed last."""
        values = values if isinstance(values, list) else [values]
        self.table.add(config, shape, contender, mode, "eager", metric, values)
        median = torch.tensor(values, dtype=torch.float64).median().item()
        self.lines.append(f"{config:24} {shape:28} {contender:34} {metric:16} {median:10.3f}")
        print(self.lines[-1], flush=True)

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def forget_peak(self):
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def timed(self, call, count, warmup=WARMUP):
        """Milliseconds of each of `count` calls after the warm-up, and all results."""
        times, results = [], []
        for _ in range(warmup + count):
            self.synchronize()
            began = time.perf_counter()
            results.append(call())
            self.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        return times[warmup:], results

    def steps(self, config, contender, model, optimizer, tokens, count):
        """Rows of training steps."""
        shape = f"{tokens.numel()} tokens a step"
        self.forget_peak()
        times, losses = self.timed(lambda: one_step(model, optimizer, tokens), count)
        losses = torch.stack(losses).tolist()
        if not losses[-1] < losses[0]:
            raise SystemExit(f"the loss on one batch went from {losses[0]} to {losses[-1]}: it does not train")
        self.add(config, shape, contender, "ms", times)
        self.add(config, shape, contender, "tokens_per_s", [1e3 * tokens.numel() / each for each in times])
        if self.on_gpu:
            # weights, buffers, adapters and Adam's state
            self.add(config, shape, contender, "between_steps_GiB", torch.cuda.memory_allocated() / GIB)
            self.add(config, shape, contender, "peak_GiB", torch.cuda.max_memory_allocated() / GIB)
            self.add(config, shape, contender, "reserved_GiB", torch.cuda.max_memory_reserved() / GIB)


def outputs_and_gradients(config, format, experts_memory, reentrant, options, steps=3):
    """Of `steps` equal batches, whose layers come from host memory again and again."""
    torch.manual_seed(0)
    without_liger = argparse.Namespace(**{**vars(options), "liger": False})
    model = build(config, format, without_liger, experts_memory, "eager")  # fused attention sums in any order
    parameters = sonicmoe_hf.lora_config(model, RANK, target_modules=ATTENTION)
    with torch.device(options.device):
        model = get_peft_model(model, parameters)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tokens, found = tokens_of(model, 1024, options.device), {}
    found["bytes"] = torch.tensor(sum(bytes_of(experts, None) for _, experts in expert_layers(model)))
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        with torch.autocast(options.device, torch.bfloat16):
            out = model(input_ids=tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        found[f"{step} logits"] = out.logits.detach().clone()
        found |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():  # evaluation between steps turns the order of layers
            found[f"{step} evaluated"] = model(input_ids=tokens, use_cache=False).logits.clone()
    return found


def check(run: Run):
    """Raise SystemExit unless streamed and resident experts give the same bits."""
    options, sizes = run.options, {"num_hidden_layers": 6, "vocab_size": 1024}
    for name, changes, cases in (
        ("qwen3", {"num_experts": 16, "hidden_size": 512}, QWEN3_CHECKS),
        ("gpt_oss", {"num_local_experts": 8, "hidden_size": 512, "intermediate_size": 512}, GPT_OSS_CHECKS),
    ):
        config = config_of(name, options, **sizes, **changes)
        for format, reentrant in cases:
            resident = outputs_and_gradients(config, format, None, reentrant, options)
            for experts_memory in (0, resident["bytes"].item() // 2):
                streamed = outputs_and_gradients(config, format, experts_memory, reentrant, options)
                differ = [key for key, tensor in resident.items() if not torch.equal(tensor, streamed[key])]
                if differ or set(resident) != set(streamed):
                    # atomic sums would differ between two runs of the resident model as well
                    again = outputs_and_gradients(config, format, None, reentrant, options)
                    noisy = [key for key, tensor in resident.items() if not torch.equal(tensor, again[key])]
                    raise SystemExit(
                        f"{name} {format} reentrant={reentrant} {experts_memory}: {len(differ)} of {len(resident)} "
                        f"tensors differ, {differ[:3]}; between two resident runs {len(noisy)}"
                    )
            run.add(name, f"{format}, reentrant {reentrant}", "streamed", "equal_tensors", len(resident))


def bandwidth(run: Run):
    """What a copy takes alone, beside matmuls, and to be pinned."""
    options, nbytes = run.options, 2**31 if run.on_gpu else 2**24
    copies, host = copies_to(torch.device(options.device)), page_aligned(nbytes)
    began = time.perf_counter()
    copies.pin(host)
    run.add("copies", f"{nbytes / GIB:.2f} GiB", "pin", "s_per_GiB", (time.perf_counter() - began) / (nbytes / GIB))
    host.fill_(1)
    target, done = copies.buffer(nbytes), copies.event()
    size = 8192 if run.on_gpu else 64
    a = torch.randn(size, size, dtype=torch.bfloat16, device=options.device)

    def copy():
        copies.copy([(target, host)], [], done)
        copies.wait(done)

    def multiply(count=20):
        for _ in range(count):
            torch.mm(a, a)

    def both():
        copies.copy([(target, host)], [], done)
        multiply()
        copies.wait(done)

    for name, call in (("copy", copy), ("matmuls", multiply), ("both", both)):
        times, _ = run.timed(call, 10)
        run.add("copies", f"{nbytes / GIB:.2f} GiB", name, "ms", times)
        if name == "copy":
            run.add("copies", f"{nbytes / GIB:.2f} GiB", name, "GB_per_s", [nbytes / each / 1e6 for each in times])
    copies.finish()
    copies.unpin(host)


def settings(run: Run):
    """(name, experts_memory) of each row, in the order in which one model takes them."""
    everything = 2**50
    return (("all on the GPU", everything), ("4 GiB on the GPU", "4GiB"), ("none on the GPU", 0))


def qwen3(run: Run):
    train_qwen3(run, 16384, settings(run), run.options.steps)


def few(run: Run):
    model, optimizer = train_qwen3(run, 2048, settings(run)[::2], run.options.steps)
    config, given = "Qwen3-30B-A3B", {}
    for name, experts_memory in reversed(settings(run)[::2]):
        sonicmoe_hf.patch_model(model, experts_memory=experts_memory)
        model.eval()
        for count in FEW:
            tokens = tokens_of(model, count, run.options.device)
            with torch.no_grad(), torch.autocast(run.options.device, torch.bfloat16):
                times, _ = run.timed(lambda tokens=tokens: model(input_ids=tokens, use_cache=False).logits, 5)
            run.add(config, f"forward of {count} tokens", name, "ms", times)
        for sequences in (1, 8):
            tokens = tokens_of(model, 16, run.options.device).expand(sequences, -1)
            with torch.autocast(run.options.device, torch.bfloat16):
                times, results = run.timed(lambda tokens=tokens: generated(model, tokens), 2, 1)
            each = [milliseconds / GENERATED for milliseconds in times]
            run.add(config, f"generation, {sequences} sequences", name, "ms_per_token", each)
            if not torch.equal(results[0], given.setdefault(sequences, results[0])):
                raise SystemExit(f"{name}: other tokens were generated")
    for name, experts_memory in settings(run)[::2]:
        sonicmoe_hf.patch_model(model, experts_memory=experts_memory)
        tokens = tokens_of(model.train(), 8, run.options.device)
        times, _ = run.timed(lambda tokens=tokens: one_step(model, optimizer, tokens), run.options.steps)
        run.add(config, "8 tokens a step", name, "ms", times)


def generated(model, tokens):
    """GENERATED tokens after a prompt, the likeliest ones, with a cache of keys and values."""
    options = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False, "use_cache": True}
    return model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)


def train_qwen3(run: Run, count, rows, steps):
    options = run.options
    base = build(config_of("qwen3", options), "nf4", options)
    model = adapted(base, options.device)
    tokens = tokens_of(model, count if not options.tiny else 64, options.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    for name, experts_memory in rows:
        sonicmoe_hf.patch_model(base, experts_memory=experts_memory)
        run.steps("Qwen3-30B-A3B", name, model, optimizer, tokens, steps)
    return model, optimizer


def layer(run: Run):
    """One layer of Qwen3's for few tokens, its weights here, there, or copied."""
    few_of_a_layer(run, "nf4")


def dense_layer(run: Run):
    """The same in bf16, whose kernels read over the bus by TMA."""
    few_of_a_layer(run, None)


def few_of_a_layer(run: Run, format: str | None):
    if not run.on_gpu:
        return
    device, copies = run.options.device, copies_to(torch.device("cuda", torch.cuda.current_device()))
    shapes, pinned = ((128, 1536, 2048), (128, 2048, 768)), []
    resident, mapped, pairs = [], [], []
    for shape in shapes:
        if format is None:
            packed = Quantized(torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02, None, None)
        else:
            packed = random_packed(shape, format, 0.02, "whole", device)
        parts = []
        for part in packed:
            if part is None:
                parts.append(None)
                continue
            host = page_aligned(part.nbytes)
            copies.pin(host)
            pinned.append(host)
            host.copy_(part.view(-1).view(torch.uint8))
            pairs.append((torch.empty(part.nbytes, dtype=torch.uint8, device=device), host))
            parts.append(copies.mapped(host).view(part.dtype).view(part.shape))
        resident.append(packed)
        mapped.append(Quantized(*parts))
    done = copies.event()

    def compute(weights, x, routing):
        gate_up, down = (
            packed.codes if format is None else PackedWeight(packed, format, torch.bfloat16) for packed in weights
        )
        return sonicmoe_hf.moe_experts(x, gate_up, down, routing)

    def copy_and_compute(x, routing):
        copies.copy(pairs, [], done)
        copies.wait(done)
        return compute(resident, x, routing)

    for count in (1, 8, 12, 16, 64, 256):
        x = torch.randn(count, 2048, dtype=torch.bfloat16, device=device)
        weights, index = torch.rand(count, 128, device=device).softmax(-1).topk(8)
        routing = (index, weights)
        rows = {
            "on the GPU": lambda x=x, routing=routing: compute(resident, x, routing),
            "copied": lambda x=x, routing=routing: copy_and_compute(x, routing),
            "over the bus": lambda x=x, routing=routing: compute(mapped, x, routing),
        }
        for name, call in rows.items():
            times, results = run.timed(call, 10)
            if not torch.equal(results[0], rows["on the GPU"]()):
                raise SystemExit(f"{name}: another result")
            run.add(f"Qwen3 layer, {(format or 'bf16').upper()}", f"{count} tokens", name, "ms", times)
    copies.finish()
    for host in pinned:
        copies.unpin(host)


def streamed_alone(run: Run, name, config, format, count, cases):
    """A model whose experts are all in host memory from the start, with adapters of each case until one fits."""
    options = run.options
    began = time.perf_counter()
    base = build(config, format, options, experts_memory=0)
    run.synchronize()
    run.add(name, f"{config.num_hidden_layers} layers", "built", "s", time.perf_counter() - began)
    host = sum(weight.nbytes for weight in base.parameters() if isinstance(weight, PackedWeight))
    run.add(name, f"{config.num_hidden_layers} layers", "experts in host memory", "GiB", host / GIB)
    for contender, trains_experts in cases:
        model = adapted(base, options.device, trains_experts)
        tokens = tokens_of(model, count if not options.tiny else 64, options.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
        try:
            run.steps(name, contender, model, optimizer, tokens, min(3, options.steps))
            return
        except torch.OutOfMemoryError as error:
            print(f"  out of memory: {str(error).splitlines()[0][:150]}", flush=True)
            run.add(name, f"{count} tokens a step", contender, "out_of_memory", 1)
        del optimizer, trained
        base = model.unload()
        del model
        run.forget_peak()


def gpt_oss(run: Run):
    if run.on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, run.options.cap * GIB / total))
    config = config_of("gpt_oss", run.options, num_hidden_layers=36, num_local_experts=128)
    cases = (("LoRA on experts and attention", True), ("LoRA on attention", False))
    streamed_alone(run, "gpt-oss-120b", config, "mxfp4", run.options.tokens or 2048, cases)
    if run.on_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)


def largest(run: Run):
    config = config_of("qwen3_235b", run.options)
    in_layer = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size * 0.52
    free = free_on_host()
    if free is not None:
        config.num_hidden_layers = min(config.num_hidden_layers, int((free - LEFT_ON_HOST) / in_layer))
    cases = (("LoRA on attention", False),)
    streamed_alone(run, "Qwen3-235B-A22B", config, "nf4", run.options.tokens or 2048, cases)


PARTS = {part.__name__: part for part in (check, bandwidth, qwen3, few, layer, dense_layer, gpt_oss, largest)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="default: check, bandwidth and qwen3")
    parser.add_argument("--cap", type=float, default=CAP_GIB, help="GiB of GPU memory for gpt_oss")
    parser.add_argument("--steps", type=int, default=5, help="timed, after the warm-up")
    parser.add_argument("--tokens", type=int, help="of a step of gpt_oss and largest")
    parser.add_argument(
        "--liger", action=argparse.BooleanOptionalAction, default=None, help="default: where installed"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to check the script")
    parser.add_argument("--csv", type=Path, default=RESULTS / "streaming.csv")
    options = parser.parse_args()
    if options.liger is None:
        options.liger = options.device == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; --device cpu --tiny checks the script")
    run = Run(options)
    for name in options.part or ("check", "bandwidth", "qwen3"):
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        PARTS[name](run)
        run.forget_peak()
        print(f"== {name}: {time.perf_counter() - began:.0f} s", flush=True)
        run.table.write(run.options.csv, keep=True)
    print("\n" + "\n".join(run.lines))


if __name__ == "__main__":
    main()
