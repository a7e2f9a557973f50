"""Compiles every Triton kernel for a GPU that need not be there: python compile_triton.py 90.

One line a kernel: name|variant|registers N|stack N|shared N|matrix N (bytes; `matrix` counts tensor-core instructions).
Run it in a process of its own: where Triton interprets, it cannot compile.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib import import_module

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sonicmoe_hf.config import ROUNDINGS
from sonicmoe_hf.kernels import quantized
from sonicmoe_hf.kernels.triton import (
    bias_gradient,
    config,
    gemm_dgated,
    gemm_down,
    gemm_up,
    gemm_wgrad,
    rounding,
    rounding_backward,
    topk,
)

# the package's attributes of these names are the backend's functions
combine, dispatch, dequantize = (
    import_module(f"sonicmoe_hf.kernels.triton.{name}") for name in ("combine", "dispatch", "dequantize")
)

GPU_KINDS = {80: "ampere", 86: "small", 90: "hopper", 100: "hopper", 120: "small"}
HIDDEN, INNER, EXPERTS = 2048, 768, 128
VARIANTS = {  # dtype, few rows per expert, interleaved, transposed, bias, descriptors where the table has them
    "bf16": ("bf16", False, False, False, False, True),
    "bf16, through pointers": ("bf16", False, False, False, False, False),
    "bf16, few rows": ("bf16", True, False, False, False, True),
    "fp16, interleaved": ("fp16", False, True, False, False, True),
    "bf16, transposed, interleaved, bias": ("bf16", False, True, True, True, True),
    "fp32": ("fp32", False, False, False, False, True),
}


def compile_kernel(kernel, arguments, target, num_warps, num_stages):
    """`arguments` by name: "*bf16" and the like for a pointer, "tensordesc<bf16[128,64]>" and the like for a descriptor,
    "i32" for a number, None or a constant."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, str) and (value.startswith(("*", "tensordesc")) or value == "i32"):
            signature[name] = value
            if value.startswith("*"):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[name] = value
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def named(names, value):
    return dict.fromkeys(names.split(), value)


INTEGERS = named("tiles token pair offsets token_offsets token_rows", "*i32")
FLOATS = named("routing_weight dw_parts dw sums", "*fp32")
NUMBERS = named("num_row_tiles num_rows", "i32")


def matrix_cases(gpu_kind, dtype, few, interleaved, transposed, bias, descriptors):
    """(name, kernel, arguments, warps, stages) of the kernels over rows."""
    table = config.TABLE[("any", 4) if dtype == "fp32" else (gpu_kind, 2)]
    buckets = ("few", "some", "many") if few else ("many",)
    shapes = {kernel: next(entries[b] for b in buckets if b in entries) for kernel, entries in table.items()}
    pointer, (E, N, K) = f"*{dtype}", (2 * INNER * HIDDEN, 2 * INNER, HIDDEN)
    common = {
        **INTEGERS, **FLOATS, **NUMBERS, **named("x weight h a dh dout source out gathered direct", pointer),
        "described": None, "bias": pointer if bias else None, "BIAS_STRIDE_E": N, "BIAS_STRIDE_N": 1, "BIAS_STRIDE_H": 1,
        "ROWS": config.SMALLEST_TILE if few else config.TILE, "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
        "NAME": "swiglu", "ALPHA": 1.702, "LIMIT": 7.0, "INTERLEAVED": interleaved, "H": HIDDEN, "I": INNER,
    }  # fmt: skip

    def described(*block):
        return f"tensordesc<{dtype}[{','.join(map(str, block))}]>"

    def case(name, kernel, operands=(), **more):
        b = shapes[name if name in shapes else "gradient"]
        block = {"COLUMNS": b.columns, "GROUP": b.group} if name in shapes else {}
        use_them = descriptors and b.descriptors
        more |= {"DEPTH": b.depth, "DESCRIBED": use_them} | (dict(operands) if use_them else {})
        return name, kernel, {**common, **block, **more}, b.warps, b.stages

    gate_up = (E, 1, N) if transposed else (E, K, 1)  # strides of [E, 2I, H]
    down = (E // 2, 1, HIDDEN) if transposed else (E // 2, INNER, 1)  # strides of [E, H, I]

    def strides(names, values):
        return dict(zip(names.split(), values))

    def weight(name, depth_last, columns=1):
        block = shapes[name].columns * columns, shapes[name].depth
        return {"weight": described(1, *(block if depth_last else block[::-1]))}

    up = shapes["up"]
    pairs = weight("up", not transposed, 2) if interleaved else {"weight": described(1, 2, up.columns, up.depth)}
    yield case("up", gemm_up.gemm_up_kernel, pairs, **strides("STRIDE_E STRIDE_N STRIDE_K", gate_up))
    for name, depth_last, values in (
        ("down", not transposed, down),
        ("input_rows", transposed, gate_up[::2] + gate_up[1:2]),
    ):
        operands = weight(name, depth_last) | {"source": described(common["ROWS"], shapes[name].depth)}
        n, k = (HIDDEN, INNER) if name == "down" else (K, N)
        yield case(
            name, gemm_down.gemm_down_kernel, operands, N=n, K=k, **strides("STRIDE_E STRIDE_N STRIDE_K", values)
        )
    piece = shapes["down_backward"].piece // (2 if interleaved else 1)
    yield case(
        "down_backward", gemm_dgated.gemm_dgated_kernel, weight("down_backward", transposed), PIECE=piece,
        **strides("STRIDE_E STRIDE_H STRIDE_I", down),
    )  # fmt: skip
    b = shapes["gradient"]
    for name, (n, m), (stride_e, stride_n, stride_m) in (
        ("gate_up_gradient", (N, K), gate_up),
        ("down_gradient", (INNER, HIDDEN), (down[0], down[2], down[1])),
    ):
        yield case(
            name, gemm_wgrad.gemm_wgrad_kernel, {"described": described(b.depth, b.width)}, M=m, N=n,
            STRIDE_E=stride_e, STRIDE_M=stride_m, STRIDE_N=stride_n, HEIGHT=b.height, WIDTH=b.width, GROUP=b.group,
            PEEL=b.peel,
        )  # fmt: skip


def other_cases():
    """The kernels without matrix products, the same way, in bf16 with everything on."""
    common = {
        **INTEGERS, **FLOATS, **NUMBERS, **named("source dout bias y out", "*bf16"), "weight": "*fp32", "H": HIDDEN,
        "N": HIDDEN, "BIAS_STRIDE_E": HIDDEN, "BIAS_STRIDE_H": 1, "NUM_EXPERTS": EXPERTS, "BINS": 256, "PARTS": 3,
    }  # fmt: skip
    yield (
        "bias_gradient",
        bias_gradient.bias_gradient_kernel,
        {**common, "SPLITS": 2, "ROWS": 16, "COLUMNS": 128},
        4,
        3,
    )
    yield "routing_gradient", gemm_dgated.routing_gradient_kernel, {**common, "ROWS": config.TILE, "DEPTH": 64}, 4, 3
    rows_per_step = combine.MAX_ROWS_PER_STEP
    yield (
        "combine",
        combine.combine_kernel,
        {**common, "ROWS_PER_STEP": rows_per_step, "COLUMNS": combine.COLUMNS},
        1,
        3,
    )
    pairs = {
        **common, **named("num_pairs num_blocks num_tokens num_row_tiles top_k", "i32"),
        **named("scratch token_counts cursors token_of_row pair_of_row", "*i32"),
        **named("expert row_of_slot", "*i64"), "BLOCK": dispatch.BLOCK, "CHUNK": dispatch.CHUNK,
        "SCAN": dispatch.SCAN, "WIDE": dispatch.WIDE, "TILE_ROWS": config.TILE, "CHECKED": True,
        "TOKENS": 16,
    }  # fmt: skip
    for lists in ({}, named("token token_counts cursors row_of_slot", None)):
        for kernel, warps in (
            (dispatch.dispatch_count_kernel, 4),
            (dispatch.dispatch_scan_kernel, 8),
            (dispatch.dispatch_place_kernel, 4),
        ):
            yield kernel.__name__, kernel, {**pairs, **lists}, warps, 3
    yield "order", dispatch.dispatch_order_kernel, {**pairs, "BLOCK": 16}, 4, 3
    scores = named("num_tokens", "i32") | {"scores": "*fp32", "index": "*i64", "NUM_EXPERTS": EXPERTS, "EXPERTS": 128}
    yield "top_k", topk.top_k_kernel, {**scores, "TOP_K": 8, "TOKENS": topk.ELEMENTS // 128}, 4, 3
    packed = {
        **named("codes scales", "*u8"), "state": "*fp32", "out": "*bf16", "offsets": "*i32",
        "VALUE_MAP": quantized.VALUE_MAP.start, "SCALE_OFFSET": quantized.SCALE_OFFSET,
        "SCALE_SCALES": quantized.SCALE_SCALES.start, "SCALES_PER_SCALE": quantized.SCALES_PER_SCALE,
    }  # fmt: skip
    for name, kernel in (("nf4", dequantize.dequantize_nf4_kernel), ("mxfp4", dequantize.dequantize_mxfp4_kernel)):
        size = quantized.FORMATS[name]
        blocks = {
            "BLOCKS_PER_EXPERT": 2 * INNER * HIDDEN // size, "BLOCKS": dequantize.VALUES // size, "BYTES": size // 2,
        }  # fmt: skip
        yield f"dequantize, {name}", kernel, {**packed, **blocks}, dequantize.WARPS, 3


def rounding_cases():
    """Token rounding's kernels the same way, at 16384 tokens."""
    held, experts = 1 << 14, 128
    common = {
        **INTEGERS, **named("keys top_words totals selection counts expert_of_row token_of_row pair_of_row", "*i32"),
        **named("scores uniform dscores", "*fp32"), **named("weights dweights", "*bf16"), "index": "*i64",
        **named("valid fell_back", "*i1"),
        **named("num_tokens num_words num_blocks num_pairs num_row_tiles top_k least_pairs", "i32"),
        "NUM_EXPERTS": EXPERTS, "EXPERTS": experts, "BINS": experts, "WORDS": held // 32, "HELD": True, "TILE": config.TILE,
        "TILE_ROWS": config.TILE, "FILL": rounding.FILL, "TOP_K": 8, "NORMALISED": True, "EPSILON": 1e-20, "SCALE": 2.5,
    }  # fmt: skip
    for padding, roundings in (({}, ROUNDINGS), (named("valid fell_back", None), ["nearest"])):
        yield "keys", rounding.rounding_keys_kernel, {**common, **padding}, 4, 3
        for name in roundings:
            yield (
                f"select, {name}",
                rounding.rounding_select_kernel,
                {**common, **padding, "ROUNDING": name},
                held // 1024,
                3,
            )
    yield "place", rounding.rounding_place_kernel, {**common, "TOKENS": rounding.MAX_PLACED // experts}, 4, 3
    block = {"TOKENS": rounding_backward.TOKENS, "ENTRIES": rounding_backward.ENTRIES}
    yield "weights_gradient", rounding_backward.rounding_gradient_kernel, {**common, **block}, 4, 3


def report(name, variant, compiled):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (re.search(rf"{key}:(\d+)", usage).group(1) for key in ("REG", "STACK"))
    matrix = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", compiled.asm["ptx"]))
    shared = compiled.metadata.shared
    print(f"{name}|{variant}|registers {registers}|stack {stack}|shared {shared}|matrix {matrix}", flush=True)


def main(target: int):
    for name, kernel, arguments, warps, stages in (*other_cases(), *rounding_cases()):
        report(name, "", compile_kernel(kernel, arguments, target, warps, stages))
    for variant, options in VARIANTS.items():
        for name, kernel, arguments, warps, stages in matrix_cases(GPU_KINDS[target], *options):
            report(name, variant, compile_kernel(kernel, arguments, target, warps, stages))


if __name__ == "__main__":
    main(int(sys.argv[1]))
