"""Values that the stand-in for the DSL computes with: kinds of numbers, layouts, tensors in memory, and registers."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch

from .machine import Machine, SimulationError


class State:
    """The GPU whose threads run, and its present thread."""

    gpu: Machine | None = None

    @property
    def thread(self):
        return self.gpu.current

    def memory(self, space):
        return self.gpu.memory if space == "gmem" else self.thread.block.shared


state = State()


class Kind:
    """A numeric type of the DSL. Called, it gives a Python number."""

    def __init__(self, name: str, width: int, convert):
        self.name, self.width, self.convert = name, width, convert

        self.bytes = width // 8
        self.code = {"BFloat16": "H", "Float16": "H", "Float32": "f", "Int32": "i", "Uint8": "B"}.get(name)

    def __call__(self, value):
        return self.convert(value)

    def __or__(self, other):
        """Make an annotation, as `Int32 | None`."""
        return object

    __ror__ = __or__

    def __repr__(self):
        return self.name


def _unsigned(value):
    value = int(value)
    if not 0 <= value < 1 << 32:
        raise SimulationError(f"{value} does not fit into 32 unsigned bits")
    return value


def _signed(value):
    value = int(value)
    if not -(1 << 31) <= value < 1 << 31:
        raise SimulationError(f"{value} does not fit into 32 bits")
    return value


def _in_bits(operation):
    return lambda value, other: Bits(operation(value, other))


class Bits(int):
    """32 bits as int32: what rounding_error.py computes with."""

    def __new__(cls, value):
        return int.__new__(cls, (value + 0x80000000 & 0xFFFFFFFF) - 0x80000000)

    __add__, __lshift__, __rshift__ = map(_in_bits, (int.__add__, int.__lshift__, int.__rshift__))
    __and__, __or__, __xor__ = map(_in_bits, (int.__and__, int.__or__, int.__xor__))
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__


FLOAT, WORD = struct.Struct("<f"), struct.Struct("<I")


def bits_of(value: float) -> int:
    """Compute the bits of the nearest fp32."""
    try:
        return WORD.unpack(FLOAT.pack(value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000


def float_of(bits: int) -> float:
    return FLOAT.unpack(WORD.pack(bits & 0xFFFFFFFF))[0]


def _nearest_bfloat16(value) -> float:
    if value != value:
        return value
    bits = bits_of(value)
    return float_of(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000)


Int32, Int64, Uint32 = Kind("Int32", 32, _signed), Kind("Int64", 64, int), Kind("Uint32", 32, _unsigned)
Float32, Boolean = Kind("Float32", 32, float), Kind("Boolean", 8, bool)
Uint8 = Kind("Uint8", 8, int)
BFloat16 = Kind("BFloat16", 16, _nearest_bfloat16)
Float16 = Kind("Float16", 16, float)  # rounded where they are stored
Float8 = Kind("Float8E4M3FN", 8, float)  # of wgmma's operands alone: in memory two are one value of 16 bits
decode_half = {
    BFloat16: lambda bits: float_of(bits << 16),
    Float16: lambda bits: struct.unpack("<e", struct.pack("<H", bits))[0],
}


def decoded(raw, kind):
    """Decode stored values as numbers; Float8 has twice as many in the last dimension."""
    if kind is Float8:
        codes = torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8))
        return codes.view(torch.float8_e4m3fn).float().numpy()
    if kind is BFloat16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view({Float16: np.float16, Float32: np.float32, Int32: np.int32}[kind])


def encoded(values, kind):
    if kind is BFloat16:
        bits = np.asarray(values, np.float32).view(np.uint32)
        rounded = bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32) >> 16
        return np.where(np.isnan(values), 0xFFFF, rounded).astype(np.uint16)
    if kind is Float16:
        with np.errstate(over="ignore"):
            return np.asarray(values, np.float16).view(np.uint16)
    return np.asarray(values, {Float32: np.float32, Int32: np.int32}[kind]).view(np.uint32)


class Pointer:
    def __init__(self, kind, address: int, space: str):
        self.kind, self.address, self.space = kind, address, space

    def __add__(self, elements):
        return Pointer(self.kind, self.address + elements * self.kind.bytes, self.space)

    def __sub__(self, elements):
        return self + -elements

    def toint(self):
        return self.address


def note_access(pointer):
    if pointer.space == "smem":
        state.thread.has_accessed = True


class Layout:
    """Shape and strides; compact with the first mode contiguous unless strides are given."""

    def __init__(self, shape, stride=None):
        self.shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if stride is None:
            stride = [math.prod(self.shape[:i]) for i in range(len(self.shape))]
        self.stride = tuple(stride)
        self.cache = {}

    def offset(self, *coordinates):
        return sum(c * s for c, s in zip(coordinates, self.stride))

    @property
    def cosize(self):
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride))


class SwizzledLayout:
    """(extent, columns, stages) in atoms of 8 x 128 bytes, whose 16-byte vectors are swizzled."""

    def __init__(self, k_major: bool, shape, order):
        self.k_major, self.shape, self.cache = k_major, tuple(shape), {}
        atom = (8, 64) if k_major else (64, 8)
        counts = (shape[0] // atom[0], shape[1] // atom[1], shape[2])
        if (counts[0] * atom[0], counts[1] * atom[1]) != self.shape[:2]:
            raise SimulationError(f"no atoms of {atom} make {shape}")
        self.atom, stride = atom, 512
        self.strides = [0, 0, 0]
        for mode in sorted(range(3), key=order.__getitem__):
            self.strides[mode], stride = stride, stride * counts[mode]

    outer = inner = property(lambda self: self)

    @property
    def cosize(self):
        return math.prod(self.shape)

    def offset(self, row, column, stage):
        (rows, columns), (a, b, c) = self.atom, self.strides
        inside = row % 8 * 64 + column % 64 if self.k_major else column % 8 * 64 + row % 64
        linear = row // rows * a + column // columns * b + stage * c + inside
        return linear ^ (linear >> 6 & 7) << 3


class Tensor:
    """A part of a tensor in memory: its modes walk over those of the layout from an origin in it.

    modes: of each (mode of the layout, step, extent). clipped: a TMA tensor, whose accesses outside the layout's shape
    are zero or dropped; other tensors may not be accessed there.
    """

    def __init__(self, pointer, layout, origin=None, modes=None, clipped=False):
        self.pointer, self.base, self.clipped = pointer, layout, clipped
        self.origin = (0,) * len(layout.shape) if origin is None else origin
        self.modes = tuple((i, 1, n) for i, n in enumerate(layout.shape)) if modes is None else modes

    element_type = property(lambda self: self.pointer.kind)
    shape = property(lambda self: tuple(extent for *_, extent in self.modes))
    stride = property(lambda self: tuple(self.base.stride[mode] * step for mode, step, _ in self.modes))
    layout = property(lambda self: Layout(self.shape, self.stride))

    @property
    def iterator(self):
        if not any(self.origin):
            return self.pointer
        return self.pointer + self.base.offset(*self.origin)

    def moved(self, amounts, modes=None):
        origin = list(self.origin)
        for (mode, step, _), amount in zip(self.modes, amounts):
            origin[mode] += amount * step
        return Tensor(self.pointer, self.base, tuple(origin), self.modes if modes is None else modes, self.clipped)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if None in index:
            if len(index) != len(self.modes):
                raise SimulationError(f"{len(index)} indices for {self.shape}")
            kept = tuple(mode for mode, i in zip(self.modes, index) if i is None)
            return self.moved([0 if i is None else i for i in index], kept)
        memory, place, kind = self._element(index)
        value = memory.one[kind.code][place]
        return decode_half[kind](value) if kind in decode_half else value

    def __setitem__(self, index, value):
        memory, place, kind = self._element(index if isinstance(index, tuple) else (index,))
        memory.one[kind.code][place] = value  # none of these tensors is of 16 bits

    def _element(self, index):
        pointer, kind = self.iterator, self.pointer.kind
        note_access(pointer)
        place = 0
        for i, (mode, step, extent) in zip(index, self.modes):
            if not 0 <= i < extent:
                raise SimulationError(f"element {index} of a tensor of {self.shape}")
            place += i * step * self.base.stride[mode]
        address = pointer.address + place * kind.bytes
        memory = state.memory(self.pointer.space)
        return memory, memory.place(address, kind.bytes), kind

    def box(self):
        """Compute (addresses, which of them lie inside) of all elements, by (first mode, second mode)."""
        (m0, s0, n0), (m1, s1, n1) = self.modes
        ranges = [self.origin[m0] + s0 * np.arange(n0), self.origin[m1] + s1 * np.arange(n1)]
        inside = (ranges[0] < self.base.shape[m0])[:, None] & (ranges[1] < self.base.shape[m1])
        inside &= (ranges[0] >= 0)[:, None] & (ranges[1] >= 0)
        inside &= all(
            0 <= self.origin[mode] < extent for mode, extent in enumerate(self.base.shape) if mode not in (m0, m1)
        )
        if isinstance(self.base, SwizzledLayout):
            coordinates = list(self.origin)
            coordinates[m0], coordinates[m1] = ranges[0][:, None], ranges[1][None, :]
            return self.pointer.address + 2 * self.base.offset(*coordinates), inside
        width, stride = self.pointer.kind.bytes, self.base.stride
        start = (self.pointer.address + width * self.base.offset(*self.origin)) % (1 << 64)
        steps = (np.arange(n0) * s0 * stride[m0])[:, None] + np.arange(n1) * s1 * stride[m1]
        return start + width * steps, inside

    def shared_places(self):
        """Compute indices of all elements into 16-bit shared memory."""
        key = self.pointer.address, self.origin, self.modes
        if key not in self.base.cache:
            addresses, inside = self.box()
            if not inside.all():
                raise SimulationError(f"outside shared memory of {self.base.shape}: {self.origin}, {self.modes}")
            self.base.cache[key] = state.thread.block.shared.places(addresses, 2)
        return self.base.cache[key]

    def read_vector(self):
        """Read all elements, which are 16 bytes."""
        memory, places = self._vector()
        return memory[places]

    def write_vector(self, values):
        """Write all elements, which are 16 bytes. Return their places in 16-bit shared memory, none of global memory."""
        memory, places = self._vector()
        memory[places] = values
        if self.pointer.space == "gmem":
            return slice(0, 0)
        halves = self.pointer.kind.bytes // 2
        return slice(places.start * halves, places.stop * halves)

    def _vector(self):
        pointer, (count,) = self.iterator, self.shape
        note_access(pointer)
        width = pointer.kind.bytes
        if pointer.address % 16 or count * width != 16:
            raise SimulationError(f"a copy of 16 bytes at {pointer.address}")
        memory = state.memory(pointer.space)
        first = memory.place(pointer.address, width)
        memory.place(pointer.address + 16 - width, width)
        return memory.of_width[width], slice(first, first + count)


class Registers:
    """A thread's values; the first mode of the shape is contiguous."""

    def __init__(self, kind, shape, values=None, start=0):
        self.kind, self.shape, self.start = kind, shape, start
        self.size = math.prod(shape)
        self.values = [math.nan] * self.size if values is None else values

    element_type = property(lambda self: self.kind)

    def __getitem__(self, index):
        if not isinstance(index, tuple):
            if not 0 <= index < self.size:
                raise SimulationError(f"register {index} of {self.size}")
            return self.values[self.start + index]
        first, *rest = index
        if first is not None:
            raise SimulationError(f"registers at {index}")
        place, step = 0, self.shape[0]
        for i, extent in zip(rest, self.shape[1:]):
            place, step = place + i * step, step * extent
        return Registers(self.kind, self.shape[:1], self.values, self.start + place)

    def __setitem__(self, index, value):
        if not 0 <= index < self.size:
            raise SimulationError(f"register {index} of {self.size}")
        self.values[self.start + index] = value

    def fill(self, value):
        self.values[self.start : self.start + self.size] = [value] * self.size

    def load(self):
        return self.values[self.start : self.start + self.size]

    def store(self, values):
        self.values[self.start : self.start + self.size] = values

    def raw(self):
        return encoded(self.load(), self.kind)

    def set_raw(self, raw):
        values = decoded(raw, self.kind).tolist()
        self.store([*map(Bits, values)] if self.kind is Int32 else values)


class Words:
    """Registers of 16 bits, two to an Int32."""

    def __init__(self, registers):
        self.registers, self.size = registers, registers.size // 2

    def __getitem__(self, index):
        low, high = encoded([self.registers[2 * index + c] for c in range(2)], self.registers.kind).tolist()
        return Bits(low | high << 16)

    def __setitem__(self, index, word):
        halves = np.array([int(word) & 0xFFFF, int(word) >> 16 & 0xFFFF], np.uint16)
        for c, value in enumerate(decoded(halves, self.registers.kind).tolist()):
            self.registers[2 * index + c] = value


class Accumulator:
    """A thread's fp32 accumulators of 64 x `columns`: part of a warp's (32, columns / 2)."""

    def __init__(self, of_warp, lane, columns):
        self.of_warp, self.lane, self.columns = of_warp, lane, columns
        self.size = columns // 2
        self.own = of_warp[lane]

    iterator = property(lambda self: self)

    def __getitem__(self, index):
        return self.own.item(index)

    def __setitem__(self, index, value):
        self.own[index] = value

    def fill(self, value):
        self.own[: self.size] = value


def coordinates_of(thread: int, columns: int):
    """Compute (row, column) of a thread's accumulators of 64 x `columns`, by the instruction's definition in PTX."""
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    return [(row + 8 * (v // 2 % 2), column + 8 * (v // 4) + v % 2) for v in range(columns // 2)]
