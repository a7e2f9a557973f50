"""One MoE layer with packed experts (NF4, MXFP4, FP8, NVFP4) beside one in bf16: errors, the bandwidth of the
dequantizing kernel, times.

    python -m benchmarks.layer.quantized_layer [--part check|dequantize|generate|train ...] [--shape T,H,I,E,K ...]

check: errors of forward against fp32 on the dequantized weights.
dequantize: bytes read and written per second, every expert having rows. generate: forward without gradients at few
tokens, by CUDA graph of a stack of layers, whose weights no cache holds; "expanded": the same with packed weights
expanded first. train: errors, and forward and backward, of a LoRA layer as in lora_layer.py. bf16, SwiGLU, random
routing. Writes quantized_layer.csv. --device cpu checks the script on small shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from pathlib import Path
from unittest import mock

import torch

from benchmarks.common.contenders import EAGER, available
from benchmarks.common.measuring import captured, relative_errors
from benchmarks.common.paths import RESULTS
from benchmarks.common.shapes import BYTES_PER_SECOND, SHAPES, Shape, activated, add_shapes, chosen_shapes, problem
from benchmarks.common.table import Table, quantiles
from benchmarks.layer.lora_contenders import through_peft
from benchmarks.layer.lora_layer import Step
from benchmarks.layer.moe_layer import interleaved_times, memory
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.checkpoints.comparing import relative_error
from sonicmoe_hf.kernels.quantized import FORMATS, quantize
from sonicmoe_hf.layer import backends
from sonicmoe_hf.layer.moe_experts import moe_experts

PARTS = ("check", "dequantize", "generate", "train")
GENERATED = (1, 8, 64, 128, 256, 512)  # tokens
STACK = 8  # layers: their packed weights together exceed the L2 cache
WANTED = {1: 1.1, 8: 1.5, 64: 2.0}  # bf16's time / packed, at Qwen3-30B-A3B's sizes
QWEN3 = SHAPES["Qwen3-30B-A3B"]
RANK = 16
GENERAL = {name: SHAPES[name] for name in ("Qwen3-30B-A3B", "gpt-oss-20b")}


@contextlib.contextmanager
def on(backend):
    with mock.patch.dict(os.environ, {backends.VARIABLE: backend}):
        yield


@contextlib.contextmanager
def never_read_packed():
    """Every packed weight is expanded, however few rows there are."""
    with mock.patch("sonicmoe_hf.kernels.triton.config.PACKED", dict.fromkeys(FORMATS, 0)):
        yield


def formats_of(shape):
    """The formats that take both weights."""
    return [name for name, block in FORMATS.items() if not (shape.H % block or shape.I % block)]


def packed_pair(weights, name):
    """gate_up and down as packed weights."""
    orders = ("concatenated", "whole")
    return [PackedWeight.quantize(weight.detach(), name, order=order) for weight, order in zip(weights, orders)]


def random_tokens(shape: Shape, device):
    """x, expert_TK and weight_TK as in `problem`."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.T, shape.H, generator=generator, device=device).bfloat16()
    weight, expert = torch.rand(shape.T, shape.E, generator=generator, device=device).topk(shape.K, dim=-1)
    return x, expert, (weight / weight.sum(-1, keepdim=True)).bfloat16()


def forward_error(out, x, expert, weight, dense):
    """Of a layer's output against fp32 on the dense weights, relative to its norm."""
    expected = torch.zeros_like(out, dtype=torch.float32)
    for e in range(len(dense[0])):
        token, place = (expert == e).nonzero(as_tuple=True)
        y = activated(x[token].float() @ dense[0][e].float().T, "swiglu") @ dense[1][e].float().T
        expected.index_add_(0, token, weight[token, place].float()[:, None] * y)
    return relative_error(out, expected)


def check(config, shape, options, add):
    """Errors of forward at few tokens, packed beside bf16 on the same values, of which bf16 has the nearest."""
    weights = problem(shape._replace(T=1), torch.bfloat16, options.device)[1:3]
    for name in formats_of(shape):
        packed = packed_pair(weights, name)
        dense, exact = ([weight.dequantize(dtype) for weight in packed] for dtype in (torch.bfloat16, torch.float32))
        for tokens in options.tokens:
            x, expert, weight = random_tokens(shape._replace(T=tokens), options.device)
            errors = {}
            for backend in options.backends:
                for label, operands, how in (
                    (name, packed, contextlib.nullcontext()),
                    (f"{name}, expanded", packed, never_read_packed()),
                    ("bf16", dense, contextlib.nullcontext()),
                ):
                    with torch.no_grad(), how:
                        out = moe_experts(x, *operands, (expert, weight), backend=backend)
                    error = forward_error(out, x, expert, weight, exact)
                    errors[f"{backend} {label}"] = error
                    add(f"{backend} {label}", f"forward, {tokens} tokens", "eager", "error_out", [error])
            print(
                f"  {config} {name} {tokens} tokens: "
                + ", ".join(f"{label} {error:.5f}" for label, error in errors.items()),
                flush=True,
            )
            assert max(errors.values()) < 1.2 * min(errors.values()) + 2**-10, "errors differ"
        del packed, dense, exact


def measured(calls, calls_each, rounds, device):
    """name -> microseconds of one of the `calls_each` calls that each makes, by CUDA graph where there is a GPU."""
    if device == "cuda":
        calls = {name: graph for name, call in calls.items() if (graph := captured(call))}
    return {
        name: [1e3 * ms / calls_each for ms in found] for name, (found, _) in interleaved_times(calls, rounds).items()
    }


def dequantize_bandwidth(config, shape, options, add):
    kernels = backends.load("eager" if options.device == "cpu" else "triton")
    expert = torch.arange(shape.E, device=options.device).view(1, shape.E)
    rows = kernels.dispatch(expert, None, 1, shape.E, False)
    for which, size in (("gate_up", (shape.E, 2 * shape.I, shape.H)), ("down", (shape.E, shape.H, shape.I))):
        for name in FORMATS:
            if size[2] % FORMATS[name]:
                continue
            weight = torch.randn(size, device=options.device, dtype=torch.bfloat16)
            packed = quantize(weight, name)
            call = lambda p=packed, n=name: kernels.dequantize(*p, n, torch.bfloat16, rows)  # noqa: E731
            copied = torch.empty_like(weight)
            copy = lambda source=weight, target=copied: target.copy_(source)  # noqa: E731
            us = measured({"kernel": call, "copy": copy}, 1, options.rounds, options.device)
            read = sum(part.nbytes for part in packed if part is not None)
            for label, size_bytes in (("kernel", read + weight.nbytes), ("copy", 2 * weight.nbytes)):
                rates = [size_bytes / value * 1e6 for value in us[label]]
                contender = f"dequantize {name}" if label == "kernel" else "copy of bf16"
                add(contender, which, "graph", "us", us[label])
                add(contender, which, "graph", "bytes_per_second", rates)
                rate = quantiles(rates)[0]
                print(
                    f"  {config} {which} {contender}: {quantiles(us[label])[0]:.1f} us, {rate / 1e12:.2f} TB/s, "
                    f"{rate / BYTES_PER_SECOND:.0%} of 4.3",
                    flush=True,
                )
            del weight, packed, copied, call, copy
            clear(options.device)


def generate(config, shape, options, add):
    """Forward of a stack of layers with weights of their own, at few tokens."""
    depth = STACK if options.device == "cuda" else 2
    inputs = problem(shape._replace(T=1), torch.bfloat16, options.device)
    weights = {"bf16": inputs[1:3]} | {name: packed_pair(inputs[1:3], name) for name in formats_of(shape)}
    stacks = {
        label: [pair, *([weight.clone() for weight in pair] for _ in range(depth - 1))]
        for label, pair in weights.items()
    }
    del inputs, weights
    for tokens in options.tokens:
        x, expert, weight = random_tokens(shape._replace(T=tokens), options.device)
        for backend in options.backends:
            calls = {}
            for label, stack in stacks.items():

                def call(stack=stack):
                    for gate_up, down in stack:
                        moe_experts(x, gate_up, down, (expert, weight), backend=backend)  # noqa: B023

                def expanded(call=call):
                    with never_read_packed():
                        call()

                calls[label] = call
                if label != "bf16":
                    calls[f"{label}, expanded"] = expanded
            with torch.no_grad():
                found = measured(calls, depth, options.rounds, options.device)
            for label, us in found.items():
                add(f"{backend} {label}", f"forward, {tokens} tokens", "graph", "us", us)
                ratios = [dense / value for dense, value in zip(found["bf16"], us)]
                add(f"{backend} {label}", f"forward, {tokens} tokens", "graph", "speedup_over_bf16", ratios)
            wanted = f", wanted {WANTED[tokens]}" if shape._replace(T=QWEN3.T) == QWEN3 and tokens in WANTED else ""
            print(
                f"  {config} {tokens} tokens {backend}: "
                + ", ".join(
                    f"{label} {quantiles(us)[0]:.1f} us (x{quantiles(found['bf16'])[0] / quantiles(us)[0]:.2f})"
                    for label, us in found.items()
                )
                + wanted,
                flush=True,
            )
            del calls
            clear(options.device)


def train(config, shape, options, add):
    """Forward and backward of a LoRA layer over packed and over bf16 experts."""
    for tokens in options.trained_tokens:
        at = shape._replace(T=tokens)
        for backend in options.backends:
            inputs = problem(at, torch.bfloat16, options.device)
            steps = {}
            for name in formats_of(at):
                packed = packed_pair(inputs[1:3], name)
                dense = [weight.dequantize() for weight in packed]
                own = (inputs[0], *dense, *inputs[3:])
                with on(backend):
                    steps[name] = Step(through_peft(at, *packed, RANK, "sonicmoe_hf"), inputs)
                    errors = relative_errors(steps[name], own)
                    if "bf16" not in steps:
                        steps["bf16"] = Step(through_peft(at, *inputs[1:3], RANK, "sonicmoe_hf"), inputs)
                        of_bf16 = relative_errors(steps["bf16"], inputs)
                for tensor, error in errors.items():
                    add(f"{backend} {name}", f"LoRA, {tokens} tokens", "eager", f"error_{tensor}", [error])
                    assert error < 1.2 * of_bf16[tensor] + 2**-10, (name, tensor, error, of_bf16[tensor])
                print(
                    f"  {config} {tokens} tokens {backend} {name}, LoRA r={RANK}: errors "
                    + " ".join(f"{tensor} {error:.4f}" for tensor, error in errors.items()),
                    flush=True,
                )
                del packed, dense, own
            with on(backend):
                found = measured(steps, 1, options.rounds, options.device)
                held = {name: memory(step) for name, step in steps.items()} if options.device == "cuda" else {}
            for name, us in found.items():
                label = f"{backend} {name}"
                add(label, f"LoRA, {tokens} tokens", "graph", "us", us)
                ratios = [value / dense for value, dense in zip(us, found["bf16"])]
                add(label, f"LoRA, {tokens} tokens", "graph", "ratio_to_bf16", ratios)
                for metric, value in held.get(name, {}).items():
                    add(label, f"LoRA, {tokens} tokens", "eager", metric, [value])
            print(
                f"  {config} {tokens} tokens {backend}, LoRA r={RANK}, forward+backward: "
                + ", ".join(
                    f"{name} {quantiles(us)[0] / 1e3:.3f} ms (x{quantiles(us)[0] / quantiles(found['bf16'])[0]:.3f})"
                    for name, us in found.items()
                ),
                flush=True,
            )
            del steps, inputs
            clear(options.device)


def clear(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shapes(parser)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--tokens", action="append", type=int, help=f"of generate and check; default {GENERATED}")
    parser.add_argument("--trained-tokens", action="append", type=int, help="of train; default 16384 and 2048")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        small = "--device cpu --shape 64,64,64,4,2 --tokens 4 --trained-tokens 16"
        raise SystemExit(f"this benchmark needs a CUDA GPU; {small} checks the script")
    options.tokens = options.tokens or list(GENERATED)
    options.trained_tokens = options.trained_tokens or [16384, 2048]
    options.backends = list(available(("hopper", "triton") if options.device == "cuda" else (EAGER,), QWEN3))
    table = Table()
    for config, shape in (chosen_shapes(options) if options.shape else GENERAL).items():

        def add(contender, mode, launch, metric, values, config=config, shape=shape):
            table.add(config, shape, contender, mode, launch, metric, values)

        for part, run in zip(PARTS, (check, dequantize_bandwidth, generate, train)):
            if part in (options.part or PARTS):
                print(f"{config} {shape} {part}", flush=True)
                run(config, shape, options, add)
                table.write(options.out / "quantized_layer.csv")
                clear(options.device)


if __name__ == "__main__":
    main()
