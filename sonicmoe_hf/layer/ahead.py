"""Kernels compiled ahead of a compiled model's first step: while torch.compile traces a layer, which takes seconds,
processes beside this one compile the kernels that it will launch.

    the op's fake version     sizes of its tensors --> a thread runs what launches its kernels on the meta device: a list
    the list                  processes that compile, for the caches on disk
    the first launch          takes a kernel from there, or waits for it

The thread then imports what launches Hopper kernels, which takes a second, while the one that traces waits for Inductor.
None of the modes in which an op is traced is on in that thread. An uncompiled step traces nothing: there the first
launch, of `up`, begins to compile the kernels of the step's other products (kernels/hopper).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels.listing import KernelList, list_kernels
from ..private.torch import example_size


class Nesting(Protocol):
    """The part of `torch_op.Form` that makes arguments of their leaves."""

    def nest(self, leaves) -> list[Any]:
        """Make the arguments of their leaves."""


class TensorSizes(NamedTuple):
    """The sizes of a tensor, without its contents."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


THREAD = "kernels of sonicmoe_hf"
_begun: set[tuple] = set()  # functions with their leaves


def begin(launches: Callable, form: Nesting, leaves: Sequence[Any]) -> None:
    """Begin to compile the kernels that `launches` asks for of these leaves, if they are tensors of a GPU, in a thread.

    Sizes that are symbols are taken as in the example that is traced, which guards nothing.
    """
    if not any(isinstance(leaf, torch.Tensor) and is_gpu(leaf.device) for leaf in leaves):
        return
    sizes = tuple(map(_sizes_of, leaves))
    if (launches, sizes) not in _begun:
        _begun.add((launches, sizes))
        threading.Thread(target=_compile, args=(launches, form, sizes), name=THREAD, daemon=True).start()


def is_gpu(device: torch.device) -> bool:
    """Tell whether kernels can be compiled for the device."""
    return device.type == "cuda"


def _compile(launches: Callable, form: Nesting, sizes: tuple) -> None:
    kernels = kernels_of(launches, form.nest(map(_on_meta, sizes)))
    if kernels.hopper:
        from ..kernels.hopper import cache

        cache.compile_ahead(kernels.hopper, fewest=1)
    if kernels.triton:
        from ..kernels.triton import ahead

        ahead.compile_ahead(kernels.triton)
    if kernels.hopper:
        importlib.import_module("..kernels.hopper.compiled", __package__)


def kernels_of(launches: Callable, arguments: Sequence[Any]) -> KernelList:
    """List the kernels that `launches` asks for of these arguments, whose tensors are on the meta device."""
    with list_kernels() as kernels:
        launches(*arguments)
    return kernels


def _sizes_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorSizes(leaf.dtype, tuple(map(example_size, leaf.shape)), tuple(map(example_size, leaf.stride())))
    return example_size(leaf) if isinstance(leaf, torch.SymInt) else leaf


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, TensorSizes):
        return torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype, device="meta")
    return leaf
