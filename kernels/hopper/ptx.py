"""Inline PTX, and with it everything that this package takes from private modules of the CuTe DSL.

`cutlass._mlir` and `cutlass.cutlass_dsl` are no public API. What is used of them is imported here alone; tried with
nvidia-cutlass-dsl 4.8.1, which pyproject.toml asks for. tests/kernels/test_private_apis.py names what a newer one lacks.
"""

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def copy_async(shared_address, address, size=None, *, loc=None, ip=None):
    """Copy 16 bytes asynchronously (cp.async), past the L1 cache, from a 64-bit global address to a 32-bit shared one;
    where `size` is 0, write zeros. L2 fetches 256 bytes: the row's next stage will want the other half."""
    operands = [Int32(shared_address).ir_value(loc=loc, ip=ip), Int64(address).ir_value(loc=loc, ip=ip)]
    if size is not None:
        operands.append(Int32(size).ir_value(loc=loc, ip=ip))
    code = "cp.async.cg.shared.global.L2::256B [$0], [$1], 16" + (";" if size is None else ", $2;")
    llvm.inline_asm(
        None,
        operands,
        code,
        "r,l" if size is None else "r,l,r",
        has_side_effects=True,
        is_align_stack=False,
        loc=loc,
        ip=ip,
    )


def _compute(kind, code, values, loc, ip):
    """Compute a register of a kind, Int32 or Float32, from others by a PTX instruction without side effects."""
    letters = {Int32: "r", Float32: "f"}
    return kind(
        llvm.inline_asm(
            {Int32: T.i32, Float32: T.f32}[kind](),
            [value.ir_value(loc=loc, ip=ip) for value in values],
            code,
            ",".join([f"={letters[kind]}", *(letters[type(value)] for value in values)]),
            has_side_effects=False,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def permute_bytes(low, high, selector, *, loc=None, ip=None) -> Int32:
    """Select four of the eight bytes of two words (prmt); a digit of the selector, from the last on, names one."""
    return _compute(Int32, "prmt.b32 $0, $1, $2, $3;", [*map(Int32, (low, high, selector))], loc, ip)


@dsl_user_op
def pack_e4m3x4(first, second, third, fourth, *, loc=None, ip=None) -> Int32:
    """Pack four fp32 values as the e4m3 bytes of a word, the first the lowest; to nearest, 448 for what is larger."""
    code = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    return _compute(Int32, code, [*map(Float32, (first, second, third, fourth))], loc, ip)


@dsl_user_op
def pack_bf16x2(first, second, *, loc=None, ip=None) -> Int32:
    """Pack two fp32 values as the bf16 halves of a word, the first in the low one; to nearest."""
    return _compute(Int32, "cvt.rn.bf16x2.f32 $0, $2, $1;", [*map(Float32, (first, second))], loc, ip)


@dsl_user_op
def multiply_add(a, b, c, *, loc=None, ip=None) -> Float32:
    """Compute a * b + c in fp32, where the product is rounded before the sum."""
    code = "{ .reg .f32 product; mul.rn.f32 product, $1, $2; add.rn.f32 $0, product, $3; }"
    return _compute(Float32, code, [*map(Float32, (a, b, c))], loc, ip)


@dsl_user_op
def multiply_bf16x2(values, scale, *, loc=None, ip=None) -> Int32:
    """Multiply the two bf16 values in a word by those in another, rounded to nearest, subnormals too."""
    code = "{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }"
    return _compute(Int32, code, [*map(Int32, (values, scale))], loc, ip)


@dsl_user_op
def dequantize_int4x2(codes, scale, *, loc=None, ip=None) -> Int32:
    """Compute two values (code - 8) * scale in bf16, rounded once; a code is the four low bits of either half of `codes`.

    In bf16 the bits 0x4300 | code are 128 + code, and 0x4308 is 128 + 8. One lop3 applies the mask and the 0x4300; of C's
    operators ptxas makes two.
    """
    code = (
        "{ .reg .b32 code, mask, offset; mov.b32 mask, 0x000f000f; mov.b32 offset, 0x43004300; "
        "lop3.b32 code, $1, mask, offset, 0xea; mov.b32 offset, 0x43084308; "
        "sub.rn.bf16x2 code, code, offset; mul.rn.bf16x2 $0, code, $2; }"
    )
    return _compute(Int32, code, [*map(Int32, (codes, scale))], loc, ip)
