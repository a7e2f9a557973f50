"""Copies from host memory to the device: by a CUDA stream of their own, or on a CPU by the processor, at once."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Hashable, Iterable
from typing import Any

import torch

CAPTURED = (
    "experts in host memory are copied when their layer runs, which a CUDA graph cannot hold; keep them on the GPU "
    "(experts_memory=None) to capture steps"
)
NOT_PINNED = "the driver did not pin {gib:.1f} GiB of host memory for experts (CUDA error {code}); {remedy}"
HOLD_FEWER = "keep more experts on the GPU (a larger experts_memory), or use a smaller format (experts_quantization)"


def page_aligned(nbytes: int, file: int | None = None) -> torch.Tensor:
    """Allocate host memory that begins at a page and takes whole pages, not a power of two of them as torch's pinned
    memory does. file: map this one, whose descriptor is closed, in place of memory of this process."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file is None else mmap.MAP_SHARED
    try:
        pages = mmap.mmap(-1 if file is None else file, max(nbytes, 1), flags=flags)
    finally:
        if file is not None:
            os.close(file)  # the map has one of its own
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)


class Copies:
    """Copies to a device, ordered against its work. This class is the CPU's, where `copy` has ended when it returns;
    CudaCopies copies in a stream of its own, beside the one that computes. `finish` alone waits for the device."""

    def __init__(self, device: torch.device):
        self.device = device

    def pin(self, host: torch.Tensor) -> None:
        """Lock memory, so that copies from it run by themselves."""

    def unpin(self, host: torch.Tensor) -> None:
        """Undo `pin`, when no copy from it is under way."""

    def map(self, host: torch.Tensor) -> torch.Tensor | None:
        """Map pinned memory as a tensor of the device, which its kernels read over the bus; None where they cannot."""
        return host

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes on the device for the stream that computes now, whose earlier work may still be using them."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def event(self) -> Any:
        """Make a point of a stream, to be set by `mark` or `copy`."""

    def mark(self, event: Any) -> None:
        """Set the event after all work that the stream that computes now was given."""

    def copy(self, transfers: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Iterable[Any], done: Any) -> None:
        """Copy each (target, source) once the events `after` are reached; set `done` at the end."""
        for target, source in transfers:
            target.copy_(source)

    def wait(self, done: Any) -> None:
        """Delay the next work of the stream that computes now until `done` is reached."""

    def timeline(self) -> Hashable:
        """Identify the stream that computes now, whose work runs in order."""

    def finish(self) -> None:
        """Wait on the host until all copies have ended, and all work that reads memory of `map`."""


def _device_address(host: torch.Tensor) -> int | None:
    """Ask the driver for the address of pinned bytes on the current GPU, which on Linux is the host's own."""
    address = ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(address), ctypes.c_void_p(host.data_ptr()), 0)
    return None if code else address.value


class _Mapped:
    """Pinned bytes at the address by which the device knows them, as torch.as_tensor takes them without a copy."""

    def __init__(self, host: torch.Tensor, address: int):
        self.host = host  # lives as long as the tensor
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaCopies(Copies):
    """A stream of copies of one GPU, ordered against its other streams by events."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)

    def pin(self, host: torch.Tensor) -> None:
        with torch.cuda.device(self.device):  # a context must be there
            code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if code:
            raise MemoryError(NOT_PINNED.format(gib=host.nbytes / 2**30, code=code, remedy=HOLD_FEWER))

    def unpin(self, host: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())

    def map(self, host: torch.Tensor) -> torch.Tensor | None:
        with torch.cuda.device(self.device):
            address = _device_address(host)
        return (
            None if address is None else torch.as_tensor(_Mapped(host, address), dtype=torch.uint8, device=self.device)
        )

    def buffer(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        buffer.record_stream(self.stream)  # freed once its copies have ended
        return buffer

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def mark(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self.device))

    def copy(self, transfers, after, done: torch.cuda.Event) -> None:
        for event in after:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            for target, source in transfers:
                target.copy_(source, non_blocking=True)
        done.record(self.stream)

    def wait(self, done: torch.cuda.Event) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)
        torch.cuda.current_stream(self.device).wait_event(done)

    def timeline(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


KINDS: dict[str, type[Copies]] = {"cuda": CudaCopies, "cpu": Copies}


def copies_to(device: torch.device) -> Copies:
    """Make the Copies of a device. Raises ValueError where nothing copies to a device of this type."""
    if device.type not in KINDS:
        raise ValueError(f"experts_memory brings experts to CUDA GPUs, not to {device.type}; leave it out")
    return KINDS[device.type](device)
