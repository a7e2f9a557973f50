"""Triton kernels compiled ahead of their first launch, by other processes, into Triton's cache on disk.

    compile_ahead   the first rank of a machine cuts the kernels that are not there into shares, and starts a process each
    compile_share   the process compiles its share, and then makes an empty file in the cache, the share's mark

A share with a mark is not compiled again. Triton's own cache cannot tell so cheaply, as it has to trace a kernel to look
for it. The processes use no GPU: they are told its target. Until Triton 3.6 each kernel also has a launcher in C, whose
compilation takes as long as the kernel's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from ..announce import is_first_of_machine
from ..listing import TritonLaunch
from ..processes import start_call
from ..sources import digest_sources
from .launch import cdiv

KERNELS_PER_PROCESS = 4  # a process takes as long to start as to compile them


class _Driver:
    """Stands for the driver of a GPU of this target."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_ahead(launches: list[TritonLaunch]) -> None:
    """Begin to compile the kernels of these launches. One that is launched before it is there is compiled at its launch,
    as ever."""
    kernels = {_key(launch): launch for launch in launches if type(launch.kernel) is JITFunction}
    processes = min(cdiv(len(kernels), KERNELS_PER_PROCESS), len(os.sched_getaffinity(0)) - 1)
    if not is_first_of_machine() or processes < 1:
        return
    target, keys = driver.active.get_current_target(), list(kernels)
    for first in range(processes):
        share = keys[first::processes]
        mark = Path(knobs.cache.dir) / f"sonicmoe_hf-{_digest(target, share)}"
        if not mark.exists():
            kernels_by_name = [(*key[:2], *kernels[key][1:]) for key in share]  # a JITFunction cannot be pickled
            with contextlib.suppress(OSError):
                start_call(__name__, "compile_share", target, kernels_by_name, mark)


def compile_share(target, share, mark: Path) -> None:
    """Compile kernels for this target, (module, name, tensors, numbers, constants, options) each, and make the share's
    mark."""
    driver.set_active(_Driver(target))
    for module, name, tensors, numbers, constants, options in share:
        kernel = getattr(importlib.import_module(module), name)
        _compile_launcher(kernel.warmup(*tensors, *numbers, *constants, grid=(1,), **options))
    mark.touch()


def _compile_launcher(compiled) -> None:
    """Compile the launcher of a kernel, where Triton has one for each."""
    if driver.active.get_current_target().backend == "cuda":
        from triton.backends.nvidia import driver as nvidia

        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)


def _key(launch: TritonLaunch) -> tuple:
    """Make a key of all that Triton compiles a kernel for: (its module, its name, ...)."""
    kernel, tensors, _, constants, options = launch
    return kernel.__module__, kernel.__name__, *map(_kind, tensors), *constants, *options.items()


def _kind(tensor):
    if type(tensor) is TensorDescriptor:
        return tensor.base.dtype, *tensor.block_shape
    return None if tensor is None else tensor.dtype


def _digest(target, share: list[tuple]) -> str:
    return hashlib.sha256(_environment() + repr((target, share)).encode()).hexdigest()[:32]


@functools.cache
def _environment() -> bytes:
    """Digest Triton's version and the sources of its kernels."""
    return triton.__version__.encode() + digest_sources(Path(__file__).with_name("__init__.py"))
