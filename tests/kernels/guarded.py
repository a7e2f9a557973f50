"""Tensors that end where an unreadable page begins, so that an index past the end is a segmentation fault."""

import contextlib
import ctypes
import mmap
import multiprocessing
from unittest import mock

import torch

SECONDS = 300
NO_ACCESS = 0  # PROT_NONE
_mapped = []  # memory outlives its tensors


def guarded(shape, strides, dtype):
    """A tensor of this shape whose last element is the last before the unreadable page; uninitialised."""
    if 0 in shape:
        return _empty(shape, dtype=dtype)
    num_bytes = (1 + sum((size - 1) * stride for size, stride in zip(shape, strides))) * dtype.itemsize
    readable = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, readable + mmap.PAGESIZE)
    _mapped.append(memory)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert protect(first + readable, mmap.PAGESIZE, NO_ACCESS) == 0
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=readable)
    return whole[readable - num_bytes :].view(dtype).as_strided(shape, strides)


def guard(tensor):
    """A copy of `tensor` at the end of its memory; None stays None."""
    return None if tensor is None else guarded(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)


def _sizes(size):
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _contiguous(shape, dtype):
    return guarded(shape, _empty(shape, device="meta").stride(), dtype)


def _new_empty(tensor, *size, dtype=None, device=None):
    return _contiguous(_sizes(size), dtype or tensor.dtype)


def _guarded_empty(*size, dtype=torch.float32, device=None):
    return _contiguous(_sizes(size), dtype)


def _empty_like(tensor):
    like = _real_like(tensor)
    return guarded(like.shape, like.stride(), like.dtype)


_empty, _real_like = torch.empty, torch.empty_like


@contextlib.contextmanager
def guarded_allocations():
    """What is allocated inside is guarded."""
    with (
        mock.patch.object(torch, "empty", _guarded_empty),
        mock.patch.object(torch, "zeros", lambda *size, **options: _guarded_empty(*size, **options).zero_()),
        mock.patch.object(torch, "empty_like", _empty_like),
        mock.patch.object(torch.Tensor, "new_empty", _new_empty),
    ):
        yield


def exit_code_of(function, *arguments):
    """Of a process that calls `function` with its allocations guarded; -11 for a segmentation fault."""

    def run():
        with guarded_allocations():
            function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    return process.exitcode
