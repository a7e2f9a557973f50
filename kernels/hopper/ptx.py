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


@dsl_user_op
def permute_bytes(low, high, selector: int, *, loc=None, ip=None) -> Int32:
    """Select four of the eight bytes of two words (prmt); a digit of the selector, from the last on, names one."""
    operands = [Int32(word).ir_value(loc=loc, ip=ip) for word in (low, high, selector)]
    return Int32(
        llvm.inline_asm(
            T.i32(),
            operands,
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            has_side_effects=False,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def pack_e4m3(first, second, third, fourth, *, loc=None, ip=None) -> Int32:
    """Pack four fp32 values as the e4m3 bytes of a word, the first the lowest; to nearest, 448 for what is larger."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(value).ir_value(loc=loc, ip=ip) for value in (first, second, third, fourth)],
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def scale_codes(codes, scale, *, loc=None, ip=None) -> Int32:
    """Return (code - 8) * scale of two bf16 values in a word, rounded once; a code is the four low bits of each half of
    `codes`. A code below 0x4300 is 128 + code in bf16. One lop3 has both masks; of C's operators ptxas makes two."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(word).ir_value(loc=loc, ip=ip) for word in (codes, scale)],
            "{ .reg .b32 code, mask, offset; mov.b32 mask, 0x000f000f; mov.b32 offset, 0x43004300; "
            "lop3.b32 code, $1, mask, offset, 0xea; mov.b32 offset, 0x43084308; "
            "sub.rn.bf16x2 code, code, offset; mul.rn.bf16x2 $0, code, $2; }",
            "=r,r,r",
            has_side_effects=False,
            is_align_stack=False,
            loc=loc,
            ip=ip,
        )
    )
