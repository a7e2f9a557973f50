"""Tensors that end where an unreadable page begins, so that an index past the end is a segmentation fault."""

import ctypes
import mmap
import multiprocessing

import torch
from moe_problems import allocations_as

SECONDS = 300
NO_ACCESS = 0  # PROT_NONE
_mapped = []  # memory outlives its tensors


def guard(tensor):
    """Copy `tensor` so that its last element is the last before the unreadable page; None stays None."""
    if tensor is None or not tensor.numel():
        return tensor
    shape, strides = tensor.shape, tensor.stride()
    num_bytes = (1 + sum((size - 1) * stride for size, stride in zip(shape, strides))) * tensor.itemsize
    readable = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, readable + mmap.PAGESIZE)
    _mapped.append(memory)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert protect(first + readable, mmap.PAGESIZE, NO_ACCESS) == 0
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=readable)
    return whole[readable - num_bytes :].view(tensor.dtype).as_strided(shape, strides).copy_(tensor)


def exit_code_of(function, *arguments):
    """Return the exit code of a process that calls `function` with its allocations guarded; -11 for a segmentation
    fault."""

    def run():
        with allocations_as(guard, "zeros"):
            function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    return process.exitcode
