"""Compiles every Triton kernel at the shapes users have, for a GPU that need not be there: python compile_triton.py 90.

Prints one line a kernel: kernel, dtype, registers a thread, spilled bytes, shared memory. Run in a process of its own, because
a process whose Triton interprets cannot compile.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sonicmoe_hf.kernels.triton import blocks, gradients, rows, sort_pairs, sum_rows

SHAPES = {90: "hopper", 80: "ampere", 86: "small"}
HIDDEN, INNER, EXPERTS = 2048, 768, 128


def compile_kernel(kernel, arguments: dict, target: int, num_warps=4, num_stages=3):
    """`arguments` in the order of the kernel: "*bf16" and the like, None, or a constant."""
    names = kernel.arg_names
    missing = [name for name in names if name not in arguments]
    assert not missing, missing
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = arguments[name]
        if isinstance(value, str) and (value.startswith("*") or value in ("i32", "i64")):
            signature[name] = value
            if value.startswith("*"):
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[name] = value
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _pointers(names, kind):
    return {name: kind for name in names.split()}


def cases(kind: str, dtype: str, few: bool = False, interleaved: bool = False, transposed: bool = False, bias=None):
    """(name, kernel, arguments, warps, stages) of every kernel over rows in `dtype`."""
    table = blocks.TABLE[("any", 4) if dtype == "fp32" else (kind, 2)]
    buckets = ("few", "some", "many") if few else ("many",)
    table = {kernel: next(entries[b] for b in buckets if b in entries) for kernel, entries in table.items()}
    common = dict(
        ROWS=64 if few else 128, PRECISION="tf32x3" if dtype == "fp32" else "tf32", num_row_tiles="i32", num_rows="i32"
    )
    gate_up_strides = (2 * INNER * HIDDEN, 1, 2 * INNER) if transposed else (2 * INNER * HIDDEN, HIDDEN, 1)
    down_strides = (INNER * HIDDEN, 1, HIDDEN) if transposed else (INNER * HIDDEN, INNER, 1)
    integers = _pointers("tiles token pair offsets token_offsets token_rows", "*i32")
    floats = _pointers("routing_weight dw_parts dw sums", "*fp32")
    activation = dict(NAME="swiglu", ALPHA=1.702, LIMIT=7.0, INTERLEAVED=interleaved)
    pointer = f"*{dtype}"
    no_bias = dict(bias=bias and pointer, BIAS_STRIDE_E=HIDDEN, BIAS_STRIDE_N=1, BIAS_STRIDE_H=1)

    def tile(name):
        b = table[name]
        return dict(COLUMNS=b.columns, DEPTH=b.depth, GROUP=b.group), b.warps, b.stages

    names, warps, stages = tile("up")
    yield "up", rows.up_kernel, {
        **_pointers("x weight h a", pointer), **integers, **common, **names, **activation, **no_bias, "H": HIDDEN, "I": INNER,
        **dict(zip(("STRIDE_E", "STRIDE_N", "STRIDE_K"), gate_up_strides)),
    }, warps, stages  # fmt: skip
    for name, (n, k), (e, sn, sk) in (
        ("down", (HIDDEN, INNER), down_strides),
        ("input_rows", (HIDDEN, 2 * INNER), (gate_up_strides[0], gate_up_strides[2], gate_up_strides[1])),
    ):
        names, warps, stages = tile(name)
        yield name, rows.rows_kernel, {
            **_pointers("source weight out", pointer), **integers, **common, **names, **no_bias, "N": n, "K": k,
            "STRIDE_E": e, "STRIDE_N": sn, "STRIDE_K": sk,
        }, warps, stages  # fmt: skip
    names, warps, stages = tile("down_backward")
    yield "down_backward", rows.down_backward_kernel, {
        **_pointers("dout weight h dh a", pointer), **integers, **floats, **common, **names, **activation,
        "PIECE": table["down_backward"].piece // (2 if interleaved else 1), "H": HIDDEN, "I": INNER, **dict(zip(("STRIDE_E", "STRIDE_H", "STRIDE_I"), down_strides)),
    }, warps, stages  # fmt: skip
    b = table["gradient"]
    for name, gather_left, (m, n) in (
        ("gate_up_gradient", False, (2 * INNER, HIDDEN)),
        ("down_gradient", True, (HIDDEN, INNER)),
    ):
        yield name, gradients.weight_gradient_kernel, {
            **_pointers("left right out", pointer), **integers, **common, "M": m, "N": n, "STRIDE_E": m * n, "STRIDE_M": n,
            "STRIDE_N": 1, "GATHER_LEFT": gather_left, "HEIGHT": b.height, "WIDTH": b.width, "DEPTH": b.depth, "GROUP": b.group, "PEEL": b.peel,
        }, b.warps, b.stages  # fmt: skip
    yield "bias_gradient", gradients.bias_gradient_kernel, {
        **integers, **floats, "source": pointer, "N": HIDDEN, "SPLITS": 2, "ROWS": 16, "COLUMNS": 128,
    }, 4, 3  # fmt: skip
    yield "routing_gradient", rows.routing_gradient_kernel, {
        **integers, **floats, **common, "dout": pointer, "bias": pointer, "H": HIDDEN, "BIAS_STRIDE_E": HIDDEN,
        "BIAS_STRIDE_H": 1, "PARTS": 6, "DEPTH": 64,
    }, 4, 3  # fmt: skip
    yield "combine", sum_rows.combine_kernel, {
        **integers, **_pointers("y out", pointer), "weight": "*fp32", "H": HIDDEN, "NUM_EXPERTS": EXPERTS, "AT_ONCE": 8,
        "COLUMNS": 1024,
    }, 4, 3  # fmt: skip


def dispatch_cases():
    integers = _pointers(
        "token token_counts keys counts ticket totals cursors offsets token_of_row pair_of_row token_offsets token_rows tiles",
        "*i32",
    )
    sizes = _pointers("num_pairs num_blocks num_tokens num_row_tiles top_k", "i32")
    constants = dict(
        NUM_EXPERTS=EXPERTS,
        BINS=256,
        BLOCK=sort_pairs.BLOCK,
        CHUNK=sort_pairs.CHUNK,
        SCAN=sort_pairs.SCAN,
        TILE_ROWS=128,
    )
    common = {**integers, **sizes, **constants, "expert": "*i64", "row_of_slot": "*i64", "valid": "*i1"}
    for listed in (False, True):
        lists = {} if listed else dict(token=None, token_counts=None, cursors=None, row_of_slot=None)
        for kernel, warps in ((sort_pairs.count_kernel, 4), (sort_pairs.scan_kernel, 8), (sort_pairs.place_kernel, 4)):
            yield kernel.__name__, kernel, {**common, **lists}, warps, 3
    yield "order", sort_pairs.order_kernel, {**common, "BLOCK": 16}, 1, 3


def report(name, label, compiled):
    import re
    import subprocess
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    registers, stack = (re.search(rf"{key}:(\d+)", usage).group(1) for key in ("REG", "STACK"))
    ttgir = compiled.asm["ttgir"]
    print(
        f"{name} {label} registers {registers} stack {stack} shared {compiled.metadata.shared} "
        f"wgmma {ttgir.count('warp_group_dot ')} async {ttgir.count('async_copy_global_to_local')} converts {ttgir.count('convert_layout')}",
        flush=True,
    )


def main(target: int):
    kind = SHAPES[target]
    for name, kernel, arguments, warps, stages in dispatch_cases():
        report(name, "", compile_kernel(kernel, arguments, target, warps, stages))
    for label, options in {
        "bf16": dict(dtype="bf16"),
        "bf16 few": dict(dtype="bf16", few=True),
        "fp16 interleaved": dict(dtype="fp16", interleaved=True),
        "bf16 transposed": dict(dtype="bf16", transposed=True),
        "bf16 transposed interleaved, bias": dict(dtype="bf16", transposed=True, interleaved=True, bias=True),
        "fp32": dict(dtype="fp32"),
    }.items():
        for name, kernel, arguments, warps, stages in cases(kind, **options):
            report(name, label, compile_kernel(kernel, {k: v for k, v in arguments.items()}, target, warps, stages))


if __name__ == "__main__":
    main(int(sys.argv[1]))
