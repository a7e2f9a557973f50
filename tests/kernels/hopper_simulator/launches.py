"""The stand-in for the DSL: shared memory, compiling and launching."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import torch

from .machine import SHARED_MEMORY, Machine, Memory, SimulationError
from .tensors import BFloat16, Float16, Float32, Int32, Layout, Pointer, Tensor, Uint8, state

SHARED_BASE = 1024
OF_WIDTH = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


class Range:
    def __init__(self, kind, count, align=8):
        self.kind, self.count, self.align = kind, count, align

    def __class_getitem__(cls, parameters):
        return cls(*parameters)


class Align:
    def __class_getitem__(cls, parameters):
        part, align = parameters
        return Range(part.kind, part.count, align)


class Part:
    def __init__(self, kind, address):
        self.kind, self.address = kind, address

    def data_ptr(self):
        return Pointer(self.kind, self.address, "smem")

    def get_tensor(self, layout, swizzle=None):
        return Tensor(self.data_ptr(), layout)


def struct(cls):
    return list(cls.__annotations__.items())


struct.MemRange, struct.Align = Range, Align


class SmemAllocator:
    def allocate(self, parts):
        block = state.thread.block
        address, places = SHARED_BASE, {}
        for name, part in parts:
            address = -(-address // part.align) * part.align
            places[name] = Part(part.kind, address)
            address += part.count * part.kind.bytes
        if address - SHARED_BASE > SHARED_MEMORY:
            raise SimulationError(f"{address - SHARED_BASE} bytes of shared memory")
        if block.shared is None:
            block.shared = Memory(SHARED_MEMORY + SHARED_BASE, SHARED_BASE)
            block.shared.allocate(address - SHARED_BASE, 16)
            block.unfenced, block.copied = (np.zeros(len(block.shared.bytes) // 2, bool) for _ in range(2))
        return SimpleNamespace(**places)


class Launch:
    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments

    def launch(self, grid, block, stream, min_blocks_per_mp):
        state.gpu.run(lambda: self.function(*self.arguments), grid[0], block[0])


class Fake:
    """Argument that a compiled kernel accepts."""

    def __init__(self, kind, shape, stride_order, assumed_align):
        self.kind, self.shape, self.order, self.align = kind, shape, stride_order, assumed_align

    def permuted(self, tensor):
        """View a tensor with the contiguous dimension last."""
        return tensor.permute(sorted(range(tensor.ndim), key=lambda i: -self.order[i]))

    def check(self, tensor, sizes):
        for size, wanted in zip(tensor.shape, self.shape):
            if isinstance(wanted, Symbol):
                wanted = sizes.setdefault(wanted, size)
            if size != wanted:
                raise SimulationError(f"a tensor of {tuple(tensor.shape)} for one of {self.shape}")
        name = {BFloat16: "bfloat16", Float16: "float16", Float32: "float32", Int32: "int32", Uint8: "uint8"}[
            self.kind
        ]
        if str(tensor.dtype) != f"torch.{name}" or tensor.ndim != len(self.shape):
            raise SimulationError(f"{tensor.dtype} of {tuple(tensor.shape)} for {self.kind} of {self.shape}")
        if tensor.data_ptr() % self.align or not self.permuted(tensor).is_contiguous():
            raise SimulationError(f"strides {tensor.stride()} or alignment of an argument of {tuple(tensor.shape)}")


class Symbol:
    """A size that is known when the kernel is launched."""


class Copied:
    """A tensor of the host's that is copied to the GPU and back."""

    def __init__(self, fake, tensor):
        self.host = fake.permuted(tensor).view(OF_WIDTH[fake.kind.width]).numpy()
        self.memory = state.gpu.memory
        address = self.memory.allocate(self.host.size * fake.kind.bytes)
        start = (address - self.memory.base) // fake.kind.bytes
        self.width, self.places = fake.kind.bytes, slice(start, start + self.host.size)
        self.memory.of_width[self.width][self.places] = self.host.reshape(-1).view(f"u{self.width}")
        self.tensor = Tensor(Pointer(fake.kind, address, "gmem"), Layout(tensor.shape, tensor.stride()))

    def copy_back(self):
        values = self.memory.of_width[self.width][self.places].reshape(self.host.shape)
        self.host[...] = values.view(self.host.dtype)


seeds = itertools.count()  # of the launches, one after the other


def compile_kernel(kernel, *fakes, options):
    *fakes, _ = fakes  # the stream is not passed

    def launch(*arguments):
        state.gpu, sizes, copied, passed = Machine(next(seeds)), {}, [], []
        if len(arguments) != len(fakes):
            raise SimulationError(f"{len(arguments)} arguments for {len(fakes)}")
        for fake, argument in zip(fakes, arguments):
            if isinstance(fake, Fake) and argument is not None:
                fake.check(argument, sizes)
                copied.append(Copied(fake, argument))
                argument = copied[-1].tensor
            elif type(fake) is not type(argument):
                raise SimulationError(f"{argument!r} for {fake!r}")
            passed.append(argument)
        kernel(*passed, None)
        for each in copied:
            each.copy_back()

    return launch
