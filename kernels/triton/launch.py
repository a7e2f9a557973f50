"""Launches in little host time, and the host's arithmetic.

Triton's own `kernel[grid](...)` inspects every argument and prints its options at each launch: about 20 us. Here only a
kernel's first launch of a kind goes through it, to be compiled; the next ones hand raw pointers to the compiled kernel.

That takes parts of Triton that are no public API, and nothing else in this package does: JITFunction.params,
CompiledKernel.run, .function and .packed_metadata, the order of the launcher's arguments,
driver.active.get_current_stream and the launch hooks of knobs.runtime. Tried with Triton 3.6 and 3.7;
tests/kernels/test_private_apis.py names what a newer one lacks.
"""

from __future__ import annotations

import time

from triton import knobs
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ..announce import announce
from ..listing import TritonLaunch, current_list
from ..tape import Recorder, launching

# (kernel, device, dtypes and blocks described, constants, options) -> compiled kernel: as many as Triton compiles
_COMPILED = {}


class _CompileTime:
    """Announces once that Triton compiles, when that has taken a second in all: kernels from its cache take far less."""

    def __init__(self):
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        before, self.seconds = self.seconds, self.seconds + seconds
        if before < 1 <= self.seconds:
            announce(
                "Triton is compiling kernels for the first step, usually 5 to 15 s in all; they are kept in its cache "
                "(TRITON_CACHE_DIR, or ~/.triton/cache)"
            )


_compile_time = _CompileTime()


def cdiv(a: int, b: int) -> int:
    """Divide a by b, rounded up. triton.cdiv is for use inside kernels too, and slow on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Round n >= 1 up to a power of two."""
    return 1 << (n - 1).bit_length()


def launch_kernel(kernel, grid, tensors, numbers=(), constants=(), **options) -> None:
    """Launch kernel[grid](*tensors, *numbers, *constants, **options), on the tensors' device, which need not be the
    current one.

    Args:
        kernel: a triton.jit function whose parameters come in this order. Triton compiles it for its tensors' dtypes and
            alignment, for which of them are None, and for constants and options: all of that is looked at here too.
        grid: up to three numbers of programs.
        tensors: tensors, tensor descriptors or None, the first not None. On the meta device the launch is listed.
        numbers: ints that the kernel names in `do_not_specialize`.
        constants: its tl.constexpr parameters; options: num_warps and the like.
    Raises:
        ValueError: Triton would compile the kernel for a number's value.
    """
    first = tensors[0]
    first = first.base if type(first) is TensorDescriptor else first
    if first.is_meta:
        current_list().triton.append(TritonLaunch(kernel, tensors, numbers, constants, options))
        return
    device = first.get_device()
    with launching(device) as recorder:
        launchable = _launch(kernel, grid, device, tensors, numbers, constants, options)
        if recorder is not None:
            _record(recorder, launchable, kernel, grid, device, tensors, numbers, constants, options)


def _is_profiled() -> bool:
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def _record(recorder: Recorder, launchable, kernel, grid, device, tensors, numbers, constants, options):
    """Record the launch as a line of a tape."""

    def operand(tensor, of_tensor):
        if type(tensor) is not TensorDescriptor:
            return of_tensor(tensor)
        return recorder.made(TensorDescriptor, tensor.base, tensor.shape, tensor.strides, tensor.block_shape)

    rest = *numbers, *map(recorder.constant, constants)
    if launchable is None:
        recorder.call(kernel[grid], *(operand(tensor, recorder.expression) for tensor in tensors), *rest, **options)
        return
    _, run, function, metadata = launchable
    recorder.guards.add(_is_profiled)
    stream = recorder.once(driver.active.get_current_stream, device)
    pointers = (operand(tensor, recorder.pointer) for tensor in tensors)
    recorder.call(
        run,
        *_programs(grid),
        stream,
        *map(recorder.constant, (function, metadata)),
        None,
        None,
        None,
        *pointers,
        *rest,
    )


def _programs(grid):
    return (*grid, 1, 1)[:3]


def _launch(kernel, grid, device, tensors, numbers, constants, options):
    """Launch on the current device, and return what the next launch of its kind needs; None where only Triton can."""
    pointers, kinds, bits = [], [], 0
    for tensor in tensors:
        if type(tensor) is TensorDescriptor:
            pointers.append(tensor)
            kinds.append((tensor.base.dtype, *tensor.block_shape))
        elif tensor is None:
            pointers.append(None)
            kinds.append(None)
        else:
            pointer = tensor.data_ptr()
            bits |= pointer
            pointers.append(pointer)
            kinds.append(tensor.dtype)
    # For pointers that are no multiples of 16, and for 64-bit numbers, Triton compiles other kernels; its interpreter
    # none.
    if bits % 16 or max(numbers, default=0) >> 31 or type(kernel) is not JITFunction:
        kernel[grid](*tensors, *numbers, *constants, **options)
        return None
    key = (id(kernel), device, *kinds, *constants, *options.items())
    launchable = _COMPILED.get(key)
    if launchable is None:
        first_number = len(tensors)
        if not all(
            parameter.do_not_specialize for parameter in kernel.params[first_number : first_number + len(numbers)]
        ):
            raise ValueError(f"{kernel.__name__} must name its numbers in do_not_specialize")
        began = time.perf_counter()
        compiled = kernel[grid](*tensors, *numbers, *constants, **options)
        _compile_time.add(time.perf_counter() - began)
        launchable = _COMPILED[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata
        return launchable
    compiled, run, function, metadata = launchable
    stream = driver.active.get_current_stream(device)
    x, y, z = _programs(grid)
    if _is_profiled():
        compiled[x, y, z](*pointers, *numbers, *constants, stream=stream)
    else:
        run(x, y, z, stream, function, metadata, None, None, None, *pointers, *numbers, *constants)
    return launchable
