"""Triton kernels compiled ahead of their first launch by processes beside this one, into Triton's cache on disk.

A process has no GPU: a driver that knows the target stands for Triton's. Where a share of kernels has been compiled, a
file in the cache says so, since Triton would have to trace a kernel to look for it.
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
from ..processes import begin
from .launch import cdiv

KERNELS = 4  # of a process, which takes as long to begin as to compile them


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
    """Begin to compile the kernels that these launches ask for. A launch before that is done compiles as it does
    otherwise. Of a machine's ranks the first begins, for all."""
    kernels = {_key(launch): launch for launch in launches if type(launch.kernel) is JITFunction}
    processes = min(cdiv(len(kernels), KERNELS), len(os.sched_getaffinity(0)) - 1)
    if not is_first_of_machine() or processes < 1:
        return
    target, keys = driver.active.get_current_target(), list(kernels)
    for first in range(processes):
        share = keys[first::processes]
        done = Path(knobs.cache.dir) / f"sonicmoe_hf-{_digest(repr((target, share)))}"
        if not done.exists():
            given = [(*key[:2], *kernels[key][1:]) for key in share]
            with contextlib.suppress(OSError):
                begin(__name__, "compile_share", target, given, done)


def compile_share(target, share, done: Path) -> None:
    """Compile kernels, (module, name, tensors, numbers, constants, options), for this target."""
    driver.set_active(_Driver(target))
    for module, name, tensors, numbers, constants, options in share:
        kernel = getattr(importlib.import_module(module), name)
        kernel.warmup(*tensors, *numbers, *constants, grid=(1,), **options)
    done.touch()


def _key(launch: TritonLaunch):
    """Give what Triton compiles a kernel for: its module and name come first."""
    kernel, tensors, _, constants, options = launch
    return kernel.__module__, kernel.__name__, *map(_kind, tensors), *constants, *options.items()


def _kind(tensor):
    if type(tensor) is TensorDescriptor:
        return tensor.base.dtype, *tensor.block_shape
    return None if tensor is None else tensor.dtype


def _digest(share: str) -> str:
    return hashlib.sha256(_sources() + share.encode()).hexdigest()[:32]


@functools.cache
def _sources() -> bytes:
    """Digest Triton's version and the kernels' sources."""
    digest = hashlib.sha256(triton.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()
