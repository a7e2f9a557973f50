"""One MoE layer with packed experts (NF4, MXFP4, FP8, NVFP4, INT4) beside one in bf16: times, and errors of training.

    python -m benchmarks.layer.quantized_layer [--part generate|train ...] [--shape T,H,I,E,K ...] [--format NAME ...]

generate: forward without gradients at few tokens, by CUDA graph of a stack of layers, whose weights no cache holds;
"expanded": the same with packed weights expanded first. train: errors, and forward and backward, of a LoRA layer as in
lora_layer.py. bf16, SwiGLU, random routing. Writes quantized_layer.csv. --device cpu checks the script on small shapes;
its times mean nothing.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from unittest import mock

import torch

from benchmarks.common.command import Command
from benchmarks.common.contenders import EAGER, available
from benchmarks.common.measuring import measure_memory, relative_errors
from benchmarks.common.shapes import SHAPES, Shape, problem
from benchmarks.common.table import Table
from benchmarks.common.timing import interleaved_times, make_replays, release
from benchmarks.layer.lora_contenders import through_peft
from benchmarks.layer.lora_layer import step_of
from sonicmoe_hf import PackedWeight
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.layer import backends, products
from sonicmoe_hf.layer.moe_experts import moe_experts

GENERATED = (1, 8, 64, 128, 256, 512)  # tokens
STACK = 8  # layers: their packed weights together exceed the L2 cache
RANK = 16
GENERAL = ("Qwen3-30B-A3B", "gpt-oss-20b")


@contextlib.contextmanager
def never_read_packed():
    """Expand every packed weight, however few rows there are; what calls of this size did before is no guide."""
    expand = mock.patch("sonicmoe_hf.kernels.triton.config.MAX_PACKED_ROWS", dict.fromkeys(FORMATS, 0))
    with expand, mock.patch("sonicmoe_hf.layer.experts_op._FORWARD_TAPES", products.forward):
        yield


def formats_of(shape, options):
    """List the formats that take both weights, of those that are asked for."""
    taken = {name: FORMATS[name].block for name in options.format or FORMATS}
    return [name for name, block in taken.items() if not (shape.H % block or shape.I % block)]


def packed_pair(weights, name):
    """Pack gate_up and down."""
    orders = ("concatenated", "whole")
    return [PackedWeight.quantize(weight.detach(), name, order=order) for weight, order in zip(weights, orders)]


def random_tokens(shape: Shape, device):
    """Make x, expert_TK and weight_TK as in `problem`."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.T, shape.H, generator=generator, device=device).bfloat16()
    weight, expert = torch.rand(shape.T, shape.E, generator=generator, device=device).topk(shape.K, dim=-1)
    return x, expert, (weight / weight.sum(-1, keepdim=True)).bfloat16()


def measure_us(calls, calls_each, options):
    """Measure the microseconds of one of the `calls_each` calls that each function makes, by name, by CUDA graph where
    there is a GPU."""
    times = interleaved_times(make_replays(calls) if options.device == "cuda" else calls, options.rounds)
    return {name: [1e3 * ms / calls_each for ms in on_device] for name, (on_device, *_) in times.items()}


def generate(shape, options, add):
    """Measure forward of a stack of layers with weights of their own, at few tokens."""
    depth = STACK if options.device == "cuda" else 2
    inputs = problem(shape._replace(T=1), torch.bfloat16, options.device)
    weights = {"bf16": inputs[1:3]} | {name: packed_pair(inputs[1:3], name) for name in formats_of(shape, options)}
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

                calls |= {label: call} | ({} if label == "bf16" else {f"{label}, expanded": expanded})
            with torch.no_grad():
                times = measure_us(calls, depth, options)
            for label, us in times.items():
                ratios = [dense / value for dense, value in zip(times["bf16"], us)]
                metrics = {"us": us, "speedup_over_bf16": ratios}
                add(f"{backend} {label}", f"forward, {tokens} tokens", "graph", metrics)
            del calls
            release()


def train(shape, options, add):
    """Measure forward and backward of a LoRA layer over packed and over bf16 experts."""
    for tokens in options.trained_tokens:
        at = shape._replace(T=tokens)
        for backend in options.backends:
            with mock.patch.dict(os.environ, {backends.BACKEND_VARIABLE: backend}):
                train_on(at, f"{backend} ", options, add)
            release()


def train_on(shape, prefix: str, options, add):
    """Run `train` at one number of tokens on the backend that is set; its name and a space begin the rows'
    contenders."""
    mode, inputs = f"LoRA, {shape.T} tokens", problem(shape, torch.bfloat16, options.device)
    steps = {"bf16": step_of(through_peft(shape, *inputs[1:3], RANK, "sonicmoe_hf"), inputs)}
    of_bf16 = relative_errors(steps["bf16"], inputs)
    for name in formats_of(shape, options):
        packed = packed_pair(inputs[1:3], name)
        steps[name] = step_of(through_peft(shape, *packed, RANK, "sonicmoe_hf"), inputs)
        dense = [weight.dequantize() for weight in packed]
        errors = relative_errors(steps[name], (inputs[0], *dense, *inputs[3:]))
        add(prefix + name, mode, "eager", {f"error_{tensor}": error for tensor, error in errors.items()})
        for tensor, error in errors.items():
            assert error < 1.2 * of_bf16[tensor] + 2**-10, (name, tensor, error, of_bf16[tensor])
        del packed, dense
    times = measure_us(steps, 1, options)
    for name, us in times.items():
        ratios = [value / dense for value, dense in zip(us, times["bf16"])]
        add(prefix + name, mode, "graph", {"us": us, "ratio_to_bf16": ratios})
    if options.device == "cuda":
        for name, step in steps.items():
            add(prefix + name, mode, "eager", measure_memory(step))


PARTS = {"generate": generate, "train": train}


def main():
    small = "--device cpu --shape 64,64,64,4,2 --tokens 4 --trained-tokens 16"
    parser = Command(__doc__, "quantized_layer.csv", small, shapes=GENERAL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="default: every one")
    parser.add_argument("--tokens", action="append", type=int, help=f"of generate; default {GENERATED}")
    parser.add_argument("--trained-tokens", action="append", type=int, help="of train; default 16384 and 2048")
    options = parser.parse_args()
    options.tokens = options.tokens or list(GENERATED)
    options.trained_tokens = options.trained_tokens or [16384, 2048]
    names = ("hopper", "triton") if options.device == "cuda" else (EAGER,)
    options.backends = list(available(names, SHAPES["Qwen3-30B-A3B"]))
    table = Table(options.csv)
    for config, shape in options.shapes.items():
        for part in options.part or PARTS:
            PARTS[part](shape, options, partial(table.add, config, shape))
            table.write()
            release()


if __name__ == "__main__":
    main()
