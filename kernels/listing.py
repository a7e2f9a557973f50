"""Lists of the kernels that a function asks for. Run on the meta device, it compiles and launches none of them.

with list_kernels() as kernels:
    function(*tensors_on_the_meta_device)     asks hopper._compiler and triton.launch_kernel, which list
kernels.hopper, kernels.triton
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

_thread = threading.local()


class TritonLaunch(NamedTuple):
    """The arguments of triton.launch.launch_kernel, but for the grid."""

    kernel: Any
    tensors: tuple
    numbers: tuple
    constants: tuple
    options: dict[str, Any]


class KernelList:
    """The kernels that were asked for so far, in order and as often as they were.

    hopper: (name of a function of hopper/compiled.py, its parameters) of each. triton: the launches.
    """

    def __init__(self) -> None:
        self.hopper: list[tuple[str, tuple]] = []
        self.triton: list[TritonLaunch] = []


def current_list() -> KernelList | None:
    """Look up the list of this thread; None where it launches its kernels."""
    return getattr(_thread, "kernels", None)


@contextlib.contextmanager
def list_kernels() -> Iterator[KernelList]:
    """List the kernels that this thread asks for inside `with`, for tensors on the meta device."""
    _thread.kernels = KernelList()
    try:
        yield _thread.kernels
    finally:
        _thread.kernels = None
