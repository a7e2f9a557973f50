"""The layers of one model whose experts live in host memory, and the two device buffers that they pass through.

A layer is fetched into a buffer before it computes, and while it computes the copy of the layer expected next begins in
the other buffer. Two layers after one another predict the third: after one step the stream knows the way forwards, the
way back in backward and recomputation, and where they turn. The two orders that keep buffers valid are events: a layer
computes after its copy, and a copy begins after the work that used the buffer before.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..kernels.quantized import Quantized
from ..layer.fetching import STREAMED
from .copies import Copies, copies_to, page_aligned

ALIGNMENT = 512  # bytes: of tensors in a buffer, as torch's allocator aligns them
FIELDS = ("", "_scales", "_state")  # what follows a projection's name in the op's inputs, in the order of Quantized
BUSY = (
    "more than two threads compute layers of one model whose experts are in host memory, and it has two buffers for "
    "them; use at most two threads, or keep the experts on the GPU (experts_memory=None)"
)


class _Buffer:
    """One of the two device buffers.

    layer: the number of the layer that is or will be in it. threads: those whose work on it is being launched. used: by
    the stream that computed with it, how far that was.
    """

    def __init__(self, copies: Copies, nbytes: int):
        self.bytes, self.copied = copies.buffer(nbytes), copies.event()
        self.layer: int | None = None
        self.threads: set[int] = set()
        self.used: dict[Any, Any] = {}
        self.views: dict[int, dict[str, torch.Tensor]] = {}
        self.mark(copies)  # memory that the allocator gave may still be in use by earlier work

    def mark(self, copies: Copies) -> None:
        """Note that what has been launched so far uses the buffer."""
        timeline = copies.timeline()
        if timeline not in self.used:
            self.used[timeline] = copies.event()
        copies.mark(self.used[timeline])


class HostLayer:
    """The weights of one layer in host memory.

    weights: by "gate_up" and "down", what is stored, over pinned bytes. number: its place in the order of the model.
    """

    def __init__(self, stream: ExpertsStream, number: int):
        self.stream, self.number = stream, number
        self.weights: dict[str, Quantized] = {}
        self._mapped: dict[str, torch.Tensor] | None = None
        self._bytes: list[torch.Tensor] = []
        self._release = weakref.finalize(self, _unpin, stream.copies, self._bytes)
        self._release.atexit = False  # CUDA may be gone by then

    @property
    def nbytes(self) -> int:
        """Of a device buffer that the layer fits in."""
        return sum(host.nbytes for host in self._bytes)

    def hold(self, projection: str, packed: Quantized) -> Quantized:
        """The host's copy of a weight, pinned."""
        starts, end = [], 0
        for part in packed:
            starts.append(end)
            end += 0 if part is None else -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        host = page_aligned(end)
        self.stream.copies.pin(host)
        self._bytes.append(host)
        held = Quantized(*(_place(part, host, start) for part, start in zip(packed, starts)))
        for part, values in zip(held, packed):
            if part is not None and values is not None:
                part.copy_(values)
        self.weights[projection] = held
        self.stream.forget(self, resized=True)
        if projection == "gate_up":
            STREAMED[held.codes.data_ptr()] = self
        return held

    def holds(self, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        pointers = [self.weights[name].codes.data_ptr() for name in ("gate_up", "down") if name in self.weights]
        return pointers == [gate_up.data_ptr(), down.data_ptr()]

    @contextlib.contextmanager
    def fetched(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Its weights on the device: between entry and exit the op launches all that reads them."""
        try:
            yield self.stream.begin(self)
        finally:
            self.stream.end()

    def mapped(self) -> dict[str, torch.Tensor] | None:
        if self._mapped is None:
            memories = [self.stream.copies.mapped(host) for host in self._bytes]
            mapped = [memory for memory in memories if memory is not None]
            self._mapped = self.views(mapped) if len(mapped) == len(memories) else {}
        return self._mapped or None

    def pairs(self, buffer: _Buffer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target in the buffer, source): one for each weight."""
        pairs, start = [], 0
        for host in self._bytes:
            pairs.append((buffer.bytes[start : start + host.nbytes], host))
            start += host.nbytes
        return pairs

    def views(self, memories: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights in memory that holds the bytes of each, by the names of the op's inputs."""
        views = {}
        for memory, host, (projection, packed) in zip(memories, self._bytes, self.weights.items()):
            for field, part in zip(FIELDS, packed):
                if part is not None:
                    views[projection + field] = _place(part, memory, part.data_ptr() - host.data_ptr())
        return views


def _place(part: torch.Tensor | None, memory: torch.Tensor, start: int) -> Any:
    """A tensor like `part` over bytes of memory that begin at `start`; on the host with a storage of its own, so that
    files of state dicts hold its bytes alone."""
    if part is None:
        return None
    own = memory[start : start + part.nbytes]
    if memory.device.type == "cpu":
        own = torch.frombuffer(own.numpy(), dtype=torch.uint8) if part.nbytes else own.clone()
    return own.view(part.dtype).view(part.shape)


def _unpin(copies: Copies, pinned: list[torch.Tensor]) -> None:
    copies.finish()
    for host in pinned:
        copies.unpin(host)


class ExpertsStream:
    """The two buffers, who is in them, and what comes next."""

    def __init__(self, device: torch.device):
        self.device, self.copies = device, copies_to(device)
        self.layers: weakref.WeakValueDictionary[int, HostLayer] = weakref.WeakValueDictionary()
        self._buffers: list[_Buffer] = []  # the one used last comes last
        self._last: tuple[int | None, int | None] = (None, None)  # the last two layers that computed
        self._next: dict[tuple[int | None, int | None], int] = {}  # what came after two layers
        self._lock = threading.Lock()

    def layer_for(self, number: int, projection: str) -> HostLayer:
        """The layer of this number whose weight is to come, made where there is none; whoever holds its weights keeps
        it."""
        layer = self.layers.get(number)
        if layer is None or projection in layer.weights:
            self.layers[number] = layer = HostLayer(self, number)
        return layer

    def begin(self, layer: HostLayer) -> Mapping[str, torch.Tensor]:
        """The layer's weights on the device, for what is launched from now until `end`."""
        thread = threading.get_ident()
        with self._lock:
            self._end(thread)  # an interrupt may have come before the last use ended
            buffer = self._buffer_of(layer)
            buffer.threads.add(thread)
            self._buffers.sort(key=lambda each: each is buffer)
            self.copies.wait(buffer.copied)
            self._fetch_ahead(layer.number)
            if layer.number not in buffer.views:
                buffer.views[layer.number] = layer.views(target for target, _ in layer.pairs(buffer))
            return buffer.views[layer.number]

    def end(self) -> None:
        """This thread has launched all that reads the layer."""
        with self._lock:
            self._end(threading.get_ident())

    def _end(self, thread: int) -> None:
        for buffer in self._buffers:
            if thread in buffer.threads:
                buffer.mark(self.copies)
                buffer.threads.discard(thread)

    def forget(self, layer: HostLayer, resized: bool = False) -> None:
        """What the host holds of a layer is about to change. resized: the buffers may be too small."""
        self.copies.finish()
        with self._lock:
            for buffer in self._buffers:
                buffer.views.pop(layer.number, None)
                buffer.layer = None if buffer.layer == layer.number else buffer.layer
            if resized:
                self._buffers = []

    def _buffer_of(self, layer: HostLayer) -> _Buffer:
        if not self._buffers:
            nbytes = max(each.nbytes for each in self.layers.values())
            self._buffers = [_Buffer(self.copies, nbytes) for _ in range(2)]
        for buffer in self._buffers:
            if buffer.layer == layer.number:
                return buffer
        free = [buffer for buffer in self._buffers if not buffer.threads]
        if not free:
            raise RuntimeError(BUSY)
        self._copy(layer, free[0])
        return free[0]

    def _copy(self, layer: HostLayer, buffer: _Buffer) -> None:
        buffer.layer = None  # until all is under way: an interrupt may come between
        self.copies.copy(layer.pairs(buffer), buffer.used.values(), buffer.copied)
        buffer.layer = layer.number

    def _fetch_ahead(self, number: int) -> None:
        before, last = self._last
        if number != last:
            if last is not None:
                self._next[self._last] = number
            self._last = before, last = last, number
        following = self.layers.get(self._following(before, number))
        if following is None or any(buffer.layer == following.number for buffer in self._buffers):
            return
        free = [buffer for buffer in self._buffers if buffer.layer != number and not buffer.threads]
        if free:
            self._copy(following, free[0])

    def _following(self, before: int | None, number: int) -> int:
        """What is expected after two layers: what came after them the last time, else the next one in their direction,
        which turns at the ends as backward does."""
        if (before, number) in self._next:
            return self._next[before, number]
        numbers = sorted(self.layers)
        step = 1 if before is None or before < number else -1
        place = numbers.index(number) + step
        if not 0 <= place < len(numbers):
            place -= 2 * step
        return numbers[place % len(numbers)]
