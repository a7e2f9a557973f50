"""Triton kernels run interpreted where there is no GPU; ../conftest.py imports them so."""

import dataclasses
import functools
import inspect
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch

from sonicmoe_hf.layer import backends

INTERPRETED = not torch.cuda.is_available()
GEMMS = ("up", "down", "down_backward", "up_backward_input", "gate_up_gradient", "down_gradient")


def patch_lang_of(interpreter):
    """Replace interpreter._patch_lang, which runs at every launch and again at every call of a function inside a kernel:
    what a launch patches serves those too."""
    from triton.language import core

    original, launches = interpreter._patch_lang, []

    def patch_lang(fn):
        if launches:
            return None
        scope = original(SimpleNamespace(__globals__={"tl": interpreter.tl, "core": core}))
        launches.append(scope)
        restore = scope.restore

        def end():
            launches.clear()
            restore()

        scope.restore = end
        return scope

    return patch_lang


def np_dtype_of(interpreter):
    """Replace interpreter._get_np_dtype, which makes a table of all types at every call."""
    original, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return get_np_dtype


def init_of_block(core):
    """Replace block_type.__init__, which checks and writes out a shape. There are few, and types of one
    shape share it."""
    original, known, shapes = core.block_type.__init__, {}, {}

    def init(self, element_ty, shape):
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = element_ty.name, sizes
        if key not in known:
            original(self, element_ty, shape)
            known[key] = shapes.setdefault(sizes, self.shape), self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init


def init_of_tensor(core):
    """Replace tensor.__init__, which makes constants of the sizes and a tuple of those."""
    original, known = core.tensor.__init__, {}

    def init(self, handle, type):
        key = type.name if type.is_block() else ""
        if key not in known:
            original(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return init


def broadcast_of(semantic):
    """Replace broadcast_impl_value, which compares shapes size by size, and two tuples of them, where both
    are one shape."""
    original = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        return original(self, lhs, rhs)

    return broadcast_impl_value


def patch_builtin_of(interpreter):
    """Replace interpreter._patch_builtin, which looks for the built-in functions at every launch, and puts in the place
    of each one that goes through its options at every call and calls two more."""

    @functools.cache
    def interpreted(package):
        members = inspect.getmembers(package, interpreter.tl.core.is_builtin)
        return [(name, with_semantic(member)) for name, member in members]

    def with_semantic(member):
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args, **options):
            options["_semantic"] = semantic
            return function(*args, **options)

        return call

    def patch_builtin(package, builder, scope):
        for name, function in interpreted(package):
            scope.set_attr(package, name, function)

    return patch_builtin


def binary_op_of(interpreter):
    """Make InterpreterBuilder.binary_op, whose comparisons are of Triton's type int1. The interpreter of Triton 3.9
    gives them the operands' type, so that a scalar comparison becomes a block of int32, which its loads refuse as a
    mask."""
    from triton.language import int1

    original = interpreter.InterpreterBuilder.binary_op

    def binary_op(self, lhs, rhs, op):
        result = original(self, lhs, rhs, op)
        if result.data.dtype == bool:
            result.dtype = int1
        return result

    return binary_op


def cast_of(interpreter):
    """Make InterpreterBuilder.cast_impl, which rounds fp32 to the nearest bf16 or e4m3 value as a GPU does; the
    interpreter's own truncates to bf16, and of e4m3 it gets ties, subnormal numbers and NaN wrong, both ways."""
    from triton.language import bfloat16, float8e4nv, float32

    original = interpreter.InterpreterBuilder.cast_impl
    stored = {bfloat16: (torch.bfloat16, torch.uint16), float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def cast_impl(self, src, dst_type, *rounding):
        source, wanted = src.dtype.scalar, dst_type.scalar
        if source == float8e4nv and wanted == float32:
            values = torch.from_numpy(numpy.array(src.data)).view(torch.float8_e4m3fn)
            return interpreter.TensorHandle(values.float().numpy(), float32)
        if source != float32 or wanted not in stored:
            return original(self, src, dst_type)
        dtype, bits = stored[wanted]
        return interpreter.TensorHandle(torch.from_numpy(numpy.array(src.data)).to(dtype).view(bits).numpy(), wanted)

    return cast_impl


def dot_of(interpreter):
    """Make InterpreterBuilder.create_dot, which multiplies bf16 and e4m3 as numbers; the interpreter's own takes
    bf16's bits for integers."""
    from triton.language import bfloat16, float8e4nv, float32

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        if a.dtype.scalar in (bfloat16, float8e4nv):
            a, b = self.cast_impl(a, float32), self.cast_impl(b, float32)
        return original(self, a, b, *rest)

    return create_dot


@functools.cache
def replacements():
    """List (object, attribute, value) of what the interpreter runs faster with, or gives a GPU's numbers."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    from sonicmoe_hf.kernels.triton import bias_gradient

    builder, cast = interpreter.InterpreterBuilder, cast_of(interpreter)
    # it computes every sum of integers again in int64, to assert that none overflowed, and asserts nothing
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    return [
        (interpreter, "_patch_lang", patch_lang_of(interpreter)),
        (interpreter, "_patch_builtin", patch_builtin_of(interpreter)),
        (interpreter, "_get_np_dtype", np_dtype_of(interpreter)),
        (core.block_type, "__init__", init_of_block(core)),
        (core.tensor, "__init__", init_of_tensor(core)),
        (semantic.TritonSemantic, "broadcast_impl_value", broadcast_of(semantic)),
        (interpreter.interpreter_builder, "options", options),
        (builder, "binary_op", binary_op_of(interpreter)),
        (builder, "cast_impl", cast),
        (builder, "create_fp_to_fp", cast),
        (builder, "create_dot", dot_of(interpreter)),
        (bias_gradient, "PROGRAMS_WANTED", 16),  # a GPU is filled by a thousand; here one comes after another
    ]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        for replacement in replacements():
            monkeypatch.setattr(*replacement)


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=["hopper", "triton"])
def backend(request):
    """Name a backend for GPUs; on other GPUs than Hopper the test is skipped for Hopper's."""
    if request.param == "hopper" and backends.choose(torch.device("cuda"), torch.bfloat16).name != "hopper":
        pytest.skip("needs a Hopper GPU")
    return request.param


@pytest.fixture
def hopper():
    """Get the Hopper backend; a GEMM that falls back to Triton fails the test."""
    from sonicmoe_hf.kernels import hopper, triton

    with mock.patch.multiple(triton, **dict.fromkeys(GEMMS, mock.Mock(side_effect=AssertionError("fell back")))):
        yield hopper


def pytest_collection_modifyitems(items):
    for item in items:
        if INTERPRETED and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
