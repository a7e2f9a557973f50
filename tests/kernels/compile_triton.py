"""Compiles the Triton kernels for GPUs that need not be there, with the arguments that the backend's functions launch.

    python compile_triton.py 90 ...                  everything for these targets
    python compile_triton.py representative 90 ...   REPRESENTATIVE: variants by target; packed for sm_89 NF4 alone
    python compile_triton.py others 89               the rest for sm_89: the other packed formats, and what has no variant

One line a kernel: target|name|variant|registers N|stack N|shared N|matrix N (bytes; `matrix` counts the tensor cores'
instructions in PTX), and where everything is compiled |instructions N, all of the machine code's but its padding: reading
that code takes as long as the compile. Run it in a process of its own: where Triton interprets, it cannot compile.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from itertools import product
from typing import NamedTuple
from unittest import mock

import torch
from moe_problems import packed_adapter
from triton import compile as triton_compile
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from sonicmoe_hf.kernels import triton as kernels
from sonicmoe_hf.kernels.interface import Activation, LoraTerm, PackedOperand, Weighting, unwritten_rows
from sonicmoe_hf.kernels.packed import FORMATS
from sonicmoe_hf.kernels.scaled import ScaledRows, transposed
from sonicmoe_hf.kernels.triton import config
from sonicmoe_hf.layer.config import ROUNDINGS

GPU_KINDS = {80: "ampere", 86: "small", 89: "small", 90: "hopper", 100: "hopper", 120: "small"}
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
HIDDEN, INNER = 2048, 768


class Variant(NamedTuple):
    dtype: torch.dtype = torch.bfloat16
    few_rows: bool = False
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    aligned: bool = True  # to 16 bytes: else nothing is read through tensor descriptors
    rank: int = 0  # of adapters; 0: none
    activation: str = "swiglu"


VARIANTS = {
    "bf16": Variant(),
    "bf16, through pointers": Variant(aligned=False),
    "bf16, few rows": Variant(few_rows=True),
    "bf16, few rows, through pointers": Variant(few_rows=True, aligned=False),
    "fp16, interleaved": Variant(torch.float16, interleaved=True),
    "bf16, transposed, interleaved, bias": Variant(interleaved=True, transposed=True, bias=True),
    "fp32": Variant(torch.float32),
    "bf16, rank 16": Variant(rank=16),
    "bf16, few rows, transposed, interleaved, rank 256": Variant(
        few_rows=True, transposed=True, interleaved=True, rank=256
    ),
    "fp32, rank 64": Variant(torch.float32, rank=64),
    "bf16, ungated": Variant(activation="relu2"),
    "fp16, ungated, transposed": Variant(torch.float16, activation="relu2", transposed=True),
    "bf16, ungated, bias, rank 64": Variant(activation="relu2", bias=True, rank=64),
    "bf16, ungated, few rows, bias, through pointers": Variant(
        few_rows=True, bias=True, aligned=False, activation="gelu"
    ),
    "fp32, ungated, bias": Variant(torch.float32, bias=True, activation="gelu_tanh"),
}
PACKED = {  # hidden, inner, rank of adapters, order, activation; gpt-oss's sizes are no multiples of a step's depth
    "packed": (HIDDEN, INNER, 0, "concatenated"),
    "packed, rank 64": (HIDDEN, INNER, 64, "interleaved"),
    "packed, cut steps": (2880, 2880, 0, "concatenated"),
    "packed, ungated": (HIDDEN, INNER, 64, "whole", "relu2"),
}
SCALED = {  # few rows, rank of adapters
    "FP8 products": (False, 0),
    "FP8 products, rank 64": (False, 64),
    "FP8 products, few rows, rank 16": (True, 16),
}
REPRESENTATIVE = {  # every entry of the table of blocks, and every variant, somewhere
    80: ("fp32", "bf16", "FP8 products, rank 64"),
    86: ("bf16, transposed, interleaved, bias", "bf16, ungated"),
    89: ("bf16, few rows", "FP8 products"),
    90: (
        "bf16",
        "bf16, through pointers",
        "bf16, few rows",
        "fp16, interleaved",
        "bf16, rank 16",
        "bf16, ungated, bias, rank 64",
    ),
    100: ("bf16",),
    120: ("bf16, through pointers",),
}
REPRESENTATIVE_PACKED = {89: ("packed, rank 64",), 90: ("packed", "packed, cut steps", "packed, ungated")}


def products(variant: Variant):
    """Yield (name, call) of the backend's functions that multiply; the tensors have the sizes that matter, and any
    values."""
    num_experts, num_pairs = 2, 64 if variant.few_rows else 600
    act = Activation(variant.activation)
    wide = act.width(INNER)
    rows = rows_of(num_pairs, num_pairs, num_experts)

    def new(*size):
        tensor = torch.empty(torch.Size(size).numel() + 1, dtype=variant.dtype)
        return tensor[:-1].view(size) if variant.aligned else tensor[1:].view(size)

    def weight(height, width):
        stored = new(num_experts, width, height) if variant.transposed else new(num_experts, height, width)
        return stored.transpose(1, 2) if variant.transposed else stored

    gate_up, down, h, a = (
        weight(wide, HIDDEN),
        weight(HIDDEN, INNER),
        new(num_pairs, wide),
        new(num_pairs, INNER),
    )
    gate_up_bias, down_bias = (new(num_experts, n) if variant.bias else None for n in (wide, HIDDEN))
    x, routed, gated = new(num_pairs, HIDDEN), torch.empty(num_pairs), (act, variant.interleaved)
    extra = {"up": None, "down": None, "down_backward": None, "up_backward_input": None}
    if variant.rank:
        rank, u = variant.rank, new(num_pairs, variant.rank)
        a1, a2 = torch.empty(2, rank, HIDDEN), torch.empty(2, rank, INNER)  # fp32, as PEFT stores them
        b1, b2 = (torch.empty(size, rank, 2).permute(2, 0, 1) for size in (wide, HIDDEN))
        first, second = packed_adapter(a1, b1, 1.0, gate_up), packed_adapter(a2, b2, 1.0, down)
        yield "reorder", lambda: packed_adapter(a1, b1, 1.0, gate_up, kernels)
        extra = {
            "up": first.term(u),
            "down": second.term(u),
            "down_backward": second.transposed_term(u),
            "up_backward_input": first.transposed_term(u),
        }
        yield "lora_shrink", lambda: kernels.lora_shrink(x, first.a.mT, rows, 1.0, True)
        yield "lora_b_backward", lambda: kernels.lora_b_backward(x, second.b, u, routed, rows, 1.0, True, True, b2)
        yield "lora_b_backward", lambda: kernels.lora_b_backward(h, first.b, u, None, rows, 1.0, False, True, b1)
        yield "lora_a_gradient", lambda: kernels.lora_a_gradient(u, a, rows, False, a2)
    yield "up", lambda: kernels.up(x, gate_up, gate_up_bias, rows, *gated, True, True, extra["up"])
    yield "down", lambda: kernels.down(a, down, down_bias, rows, extra["down"])
    yield "up_backward_input", lambda: kernels.up_backward_input(h, gate_up, rows, extra["up_backward_input"])
    yield (
        "down_backward",
        lambda: kernels.down_backward(
            x, down, down_bias, h, routed, rows, *gated, True, True, True, extra["down_backward"]
        ),
    )
    yield "gate_up_gradient", lambda: kernels.gate_up_gradient(h, x, rows, gate_up)
    yield "down_gradient", lambda: kernels.down_gradient(x, a, rows, down)


def scaled_products(few_rows, rank):
    """Yield (name, call) of the functions of layers with FP8 products; those of backward without what an adapter
    wants, or with."""
    num_experts, num_pairs, act, extra = 2, 64 if few_rows else 600, Activation(), {}
    rows, routed = rows_of(num_pairs, num_pairs, num_experts), torch.empty(num_pairs)
    x, h = (torch.empty(num_pairs, size, dtype=torch.bfloat16) for size in (HIDDEN, 2 * INNER))
    sizes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
    gate_up, down = (
        PackedOperand(*packed_weight("fp8", num_experts, *size, order), "fp8")
        for size, order in zip(sizes, ("concatenated", "whole"))
    )
    if rank:
        u = torch.empty(num_pairs, rank, dtype=torch.bfloat16)
        for name, width in (("up", 2 * INNER), ("down", HIDDEN), ("down_backward", INNER), ("dx", HIDDEN)):
            extra[name] = LoraTerm(u, torch.empty(num_experts, width, rank, dtype=torch.bfloat16))
    x8, a8, dh8 = (
        ScaledRows(torch.empty(num_pairs, size, dtype=torch.uint8), torch.empty(num_pairs, -(-size // 128)))
        for size in (HIDDEN, INNER, 2 * INNER)
    )
    down_t, gate_up_t = (transposed(*packed[:2]) for packed in (down, gate_up))
    options, wanted = (rows, act, torch.bfloat16), (bool(rank), bool(rank), True, True)
    yield "scale_rows", lambda: kernels.scale_rows(x)
    yield "transposed", lambda: kernels.transposed(*gate_up[:2])
    yield "up", lambda: kernels.scaled_up(x8, gate_up, *options, True, bool(rank), True, extra.get("up"))
    yield "down", lambda: kernels.scaled_down(a8, down, rows, torch.bfloat16, extra.get("down"))
    yield "up_backward_input", lambda: kernels.scaled_down(dh8, gate_up_t, rows, torch.bfloat16, extra.get("dx"))
    yield (
        "down_backward",
        lambda: kernels.scaled_down_backward(x8, down_t, h, routed, rows, act, *wanted, extra.get("down_backward")),
    )


def others():
    """List the launches of the functions that do not multiply, at 16384 tokens of 128 experts."""
    num_tokens, num_experts, top_k = 16384, 128, 8
    num_pairs = num_tokens * top_k
    rows = rows_of(num_pairs, num_tokens, num_experts)
    y, bias = torch.empty(num_pairs, 64, dtype=torch.bfloat16), torch.empty(num_experts, 64, dtype=torch.bfloat16)
    weight, scores = torch.empty(num_pairs), torch.empty(num_tokens, num_experts)
    index, valid = torch.empty(num_tokens, top_k, dtype=torch.int64), torch.empty(num_tokens, dtype=torch.bool)
    yield "gate_up_bias_gradient", lambda: kernels.gate_up_bias_gradient(y, rows, bias)
    yield "down_bias_gradient", lambda: kernels.down_bias_gradient(y, weight, rows, bias)
    yield "combine", lambda: kernels.combine(y, weight, rows, num_tokens)
    yield "combine, unweighted", lambda: kernels.combine(y, None, rows, num_tokens)
    for sentinels in (False, True):
        yield "dispatch", lambda s=sentinels: kernels.dispatch(index, None, num_tokens, num_experts, s)
        yield "dispatch, few", lambda s=sentinels: kernels.dispatch(index[:64], None, 64, num_experts, s)
    flat = index.view(-1)
    yield "dispatch, list", lambda: kernels.dispatch(flat, flat, num_tokens, num_experts, True)
    weighting, uniform = Weighting(True, 1e-20, 2.5), torch.empty(num_experts)
    for rounding in ROUNDINGS:
        for mask in (valid, None) if rounding == "nearest" else (valid,):
            options = mask, uniform, rounding, 128, 0, num_pairs, weighting, torch.bfloat16
            yield f"round_rows, {rounding}", lambda o=options: kernels.round_rows(scores, scores, index, *o)
    expert = torch.empty(num_pairs, dtype=torch.int32)
    for name in FORMATS:
        for order, kind in (("concatenated", 0), ("interleaved", 1)):
            packed = packed_weight(name, num_experts, 2 * INNER, HIDDEN, order, kind)
            yield f"dequantize, {name}", lambda p=packed, n=name: kernels.dequantize(*p, n, torch.bfloat16, rows)
    yield "round_rows_backward", lambda: kernels.round_rows_backward(weight, scores, expert, rows, weighting)


def packed_weight(name, num_experts, height, width, order="whole", kind=0):
    """Make a packed weight of any values, of the dtypes that come at place `kind` where there are several."""
    shapes = FORMATS[name].shapes((num_experts, height, width), order)
    dtypes = (FORMATS[name].dtypes(part) for part in shapes._fields)
    return [
        None if shape is None else torch.empty(shape, dtype=of[min(kind, len(of) - 1)])
        for shape, of in zip(shapes, dtypes)
    ]


def packed_products(name, hidden, inner, rank, order, activation="swiglu"):
    """Yield (name, call) of up and down reading packed weights of 128 experts, at 64 tokens; FP8's scales are bytes
    where gates and ups are interleaved."""
    num_experts, num_pairs = 128, 512
    rows = rows_of(num_pairs, 64, num_experts)
    x, a = (torch.empty(num_pairs, size, dtype=torch.bfloat16) for size in (hidden, inner))
    act, interleaved = Activation(activation), order == "interleaved"
    sizes = (act.width(inner), hidden), (hidden, inner)
    gate_up, down = (
        PackedOperand(*packed_weight(name, num_experts, *size, of, interleaved), name)
        for size, of in zip(sizes, (order, "whole"))
    )
    extra = [None, None]
    if rank:
        u = torch.empty(num_pairs, rank, dtype=torch.bfloat16)
        adapters = ((torch.empty(num_experts, rank, k), torch.empty(num_experts, n, rank)) for n, k in sizes)
        like = torch.empty(num_experts, 1, 1, dtype=torch.bfloat16)  # of the weight: its experts, dtype and order
        extra = [packed_adapter(*adapter, 1.0, like).term(u) for adapter in adapters]
    yield "up", lambda: kernels.up(x, gate_up, None, rows, act, interleaved, False, True, extra[0])
    yield "down", lambda: kernels.down(a, down, None, rows, extra[1])


def rows_of(num_pairs, num_tokens, num_experts):
    num_tiles = kernels.tile_table_length(num_pairs, num_experts)
    return unwritten_rows(torch.empty(0), num_pairs, num_tokens, num_experts, num_tiles)


def launches_of(call):
    """List (kernel, tensors, numbers, constants, options) of every launch of a call; nothing is launched."""
    seen = []

    def record(kernel, grid, tensors, numbers=(), constants=(), **options):
        seen.append((kernel, tensors, numbers, constants, options))

    with contextlib.ExitStack() as patches:
        for name, module in [*sys.modules.items()]:
            if name.startswith("sonicmoe_hf.kernels.triton") and hasattr(module, "launch_kernel"):
                patches.enter_context(mock.patch.object(module, "launch_kernel", record))
        call()
    return seen


def compile_launch(target, kernel, tensors, numbers, constants, options):
    """Compile the kernel as Triton would for these arguments on a GPU of that target."""
    signature, constexprs, attributes = {}, {}, {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, (*tensors, *numbers, *constants), strict=True)):
        if index >= len(tensors) + len(numbers) or value is None:
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    return triton_compile(source, target=GPUTarget("cuda", target, 32), options=options)


def report(target, name, variant, compiled, with_instructions):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        wanted = ["-res-usage", *["-sass"] * with_instructions]
        command = [knobs.nvidia.cuobjdump.path, *wanted, file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (re.search(rf"{key}:(\d+)", shown).group(1) for key in ("REG", "STACK"))
    matrix = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", compiled.asm["ptx"]))
    figures = f"registers {registers}|stack {stack}|shared {compiled.metadata.shared}|matrix {matrix}"
    if with_instructions:
        figures += f"|instructions {len(re.findall(r'/[*][0-9a-f]{4,}[*]/ +(?!NOP)[@A-Z]', shown))}"
    print(f"{target}|{name}|{variant}|{figures}", flush=True)


def compiled_calls(target, calls):
    """Yield (name, compiled kernel) of every launch."""
    for name, call in calls:
        for kernel, *arguments in launches_of(call):
            # the product of a function that launches several kernels goes by the function's name
            is_product = kernel.__name__.startswith("gemm_")
            yield name if is_product else f"{name}: {kernel.__name__}", compile_launch(target, kernel, *arguments)


def main(target: int, labels, packed, formats=FORMATS, with_others=True, with_instructions=False):
    config.gpu_kind = lambda device: GPU_KINDS[target]
    config.multiplies_fp8 = lambda device: target >= 89
    for module in [module for name, module in sys.modules.items() if name.startswith("sonicmoe_hf.kernels.triton")]:
        for kept in vars(module).values():
            getattr(kept, "cache_clear", lambda: None)()
    of_variant = {"": others()} if with_others else {}
    for label, name in product(packed, formats):
        of_variant[f"{name}, {label}"] = packed_products(name, *PACKED[label])
    for label in labels:
        of_variant[label] = scaled_products(*SCALED[label]) if label in SCALED else products(VARIANTS[label])
    for variant, calls in of_variant.items():
        for name, compiled in compiled_calls(target, calls):
            report(target, name, variant, compiled, with_instructions)


if __name__ == "__main__":
    kind, *targets = sys.argv[1:] if sys.argv[1] in ("representative", "others") else ["everything", *sys.argv[1:]]
    for target in map(int, targets):
        packed = REPRESENTATIVE_PACKED.get(target, ())
        if kind == "everything":
            main(target, VARIANTS | SCALED, PACKED, with_instructions=True)
        elif kind == "others":
            main(target, (), packed, [name for name in FORMATS if name != "nf4"])
        else:
            main(target, REPRESENTATIVE[target], packed, ["nf4"] if target == 89 else FORMATS, with_others=False)
