"""Lists of the kernels that a function launches. It runs on the meta device, where nothing is compiled or launched."""

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


class Listing:
    """The kernels of calls so far.

    hopper: (function of hopper/compiled.py, its parameters) of each.
    """

    def __init__(self) -> None:
        self.hopper: list[tuple[str, tuple]] = []
        self.triton: list[TritonLaunch] = []


def listing() -> Listing | None:
    """Give this thread's list, or None where kernels are launched."""
    return getattr(_thread, "listing", None)


@contextlib.contextmanager
def listed() -> Iterator[Listing]:
    """Give the list of the kernels that this thread launches inside `with`, of tensors on the meta device."""
    _thread.listing = Listing()
    try:
        yield _thread.listing
    finally:
        _thread.listing = None
