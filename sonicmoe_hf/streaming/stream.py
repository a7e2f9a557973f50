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
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..kernels.packed import Quantized
from ..layer.fetching import STREAMED
from .copies import Copies, copies_to, page_aligned

ALIGNMENT = 512  # bytes: of tensors in a buffer, as torch's allocator aligns them
BUSY = (
    "more than two threads compute layers of one model whose experts are in host memory, and it has two buffers for "
    "them; use at most two threads, or keep the experts on the GPU (experts_memory=None)"
)


class _Buffer:
    """One of the two device buffers.

    bytes: the buffer. copied: the event after the copy into it. layer: a reference to the layer whose weights are in it,
    or are on their way. threads: those that are launching work on it. used: by the stream that computes, the event after
    its last work on the buffer. views: the weights in the buffer, by layer.
    """

    def __init__(self, copies: Copies, nbytes: int):
        self.bytes, self.copied = copies.buffer(nbytes), copies.event()
        self.layer: Reference | None = None
        self.threads: set[int] = set()
        self.used: dict[Any, Any] = {}
        self.views: weakref.WeakKeyDictionary[HostLayer, dict[str, Quantized]] = weakref.WeakKeyDictionary()
        self.mark(copies)  # memory that the allocator gave may still be in use by earlier work

    def mark(self, copies: Copies) -> None:
        """Note that all work launched so far uses the buffer."""
        timeline = copies.timeline()
        if timeline not in self.used:
            self.used[timeline] = copies.event()
        copies.mark(self.used[timeline])


class HostLayer:
    """The weights of one layer in host memory.

    weights: by "gate_up" and "down", the tensors, over pinned bytes. fills: whether this process writes them.
    has_one_copy: whether other ranks of the host read them too.
    """

    def __init__(self, stream: ExpertsStream, fills: bool = True, has_one_copy: bool = False):
        self.stream, self.reference, self.fills, self.has_one_copy = stream, weakref.ref(self), fills, has_one_copy
        self.weights: dict[str, Quantized] = {}
        self._mapped: dict[str, Quantized] | None = None
        self._bytes: dict[str, torch.Tensor] = {}
        self.release = weakref.finalize(self, _unpin, stream.copies, self._bytes)
        self.release.atexit = False  # CUDA may be gone by then
        stream.add(self)

    @property
    def nbytes(self) -> int:
        """The bytes of a device buffer that the layer fits in."""
        return sum(host.nbytes for host in self._bytes.values())

    def reserve(self, projection: str, host: torch.Tensor) -> None:
        """Pin host memory, `room_for` a weight. Raises MemoryError where the driver does not."""
        self.stream.copies.pin(host)
        self._bytes[projection] = host
        self.stream.resize()

    def hold(self, projection: str, packed: Quantized) -> Quantized:
        """Copy a weight to the host memory that is reserved for it, unless another rank does."""
        sizes = [0 if tensor is None else ALIGNMENT * -(-tensor.nbytes // ALIGNMENT) for tensor in packed]
        needed, tensors, start = sum(sizes), [], 0
        # memory of this process alone can grow, for a layer that its checkpoint has in floats
        if needed > self._bytes[projection].nbytes and not self.has_one_copy:
            self.stream.copies.unpin(self._bytes.pop(projection))
            self.reserve(projection, page_aligned(needed))
        for tensor, size in zip(packed, sizes):
            tensors.append(_like(tensor, self._bytes[projection], start))
            if tensor is not None and self.fills:
                tensors[-1].copy_(tensor)
            start += size
        self._bytes[projection] = self._bytes[projection][:needed]  # copies to the device take no more
        self.weights[projection] = held = Quantized(*tensors)
        if projection == "gate_up":
            STREAMED[held.codes.data_ptr()] = self
        return held

    def holds(self, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """Tell whether these tensors are the codes of its two weights."""
        pointers = [self.weights[name].codes.data_ptr() for name in ("gate_up", "down") if name in self.weights]
        return pointers == [gate_up.data_ptr(), down.data_ptr()]

    @contextlib.contextmanager
    def fetch(self) -> Iterator[Mapping[str, Quantized]]:
        """Bring the layer's weights to the device: between entry and exit the op launches all that reads them."""
        try:
            yield self.stream.begin(self)
        finally:
            self.stream.end()

    @torch.inference_mode(False)  # what is kept must serve calls of every mode
    def map(self) -> dict[str, Quantized] | None:
        """Map the layer's weights in host memory, as tensors that kernels of the device read; None where they cannot."""
        if self._mapped is None:
            mapped = ((name, self.stream.copies.map(host)) for name, host in self._bytes.items())
            memories = {name: memory for name, memory in mapped if memory is not None}
            self._mapped = self.views(memories) if len(memories) == len(self._bytes) else {}
        return self._mapped or None

    def targets(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a device buffer into the slices that the weights are copied to."""
        sizes = [host.nbytes for host in self._bytes.values()]
        return dict(zip(self._bytes, buffer[: sum(sizes)].split(sizes)))

    def transfers(self, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """List (target in the buffer, source) of each weight."""
        return [(target, self._bytes[name]) for name, target in self.targets(buffer).items()]

    def views(self, memories: Mapping[str, torch.Tensor]) -> dict[str, Quantized]:
        """View the weights in memory that holds the bytes of each."""
        views = {}
        for name, packed in self.weights.items():
            starts = (0 if tensor is None else tensor.data_ptr() - self._bytes[name].data_ptr() for tensor in packed)
            views[name] = Quantized(*(_like(tensor, memories[name], start) for tensor, start in zip(packed, starts)))
        return views


Reference = weakref.ref[HostLayer]


def room_for(nbytes: int) -> int:
    """Count the bytes of host memory that a weight which stores so many takes, each of its tensors aligned."""
    return ALIGNMENT * (-(-nbytes // ALIGNMENT) + len(Quantized._fields) - 1)


def _like(tensor: torch.Tensor | None, memory: torch.Tensor, start: int) -> Any:
    """Make a tensor like this one over bytes of memory that begin at `start`; on the host with a storage of its own, so
    that files of state dicts hold its bytes alone."""
    if tensor is None:
        return None
    own = memory[start : start + tensor.nbytes]
    if memory.device.type == "cpu":
        own = torch.frombuffer(own.numpy(), dtype=torch.uint8) if tensor.nbytes else own.clone()
    return own.view(tensor.dtype).view(tensor.shape)


def _unpin(copies: Copies, pinned: dict[str, torch.Tensor]) -> None:
    copies.finish()
    while pinned:
        copies.unpin(pinned.popitem()[1])


class ExpertsStream:
    """The two buffers, the layers that are in them, and the order in which layers come. It keeps no layer alive."""

    def __init__(self, device: torch.device):
        self.device, self.copies = device, copies_to(device)
        self._layers: list[Reference] = []  # in the order in which they were made
        self._buffers: list[_Buffer] = []  # the one used last comes last
        self._last: tuple[Reference | None, Reference | None] = (None, None)  # the last two layers that computed
        self._next: dict[tuple[Reference | None, Reference | None], Reference] = {}  # what came after two layers
        self._lock = threading.Lock()

    def add(self, layer: HostLayer) -> None:
        """Note a layer that has been made."""
        self._layers = [reference for reference in self._layers if reference() is not None] + [layer.reference]

    def resize(self) -> None:
        """Make other buffers and learn the order anew, because a layer has more bytes than before."""
        self.copies.finish()
        with self._lock:
            self._buffers, self._next = [], {}

    @torch.inference_mode(False)
    def begin(self, layer: HostLayer) -> Mapping[str, Quantized]:
        """Bring the layer's weights to the device, for kernels that are launched from now until `end`."""
        thread = threading.get_ident()
        with self._lock:
            self._end(thread)  # an interrupt may have come before the last use ended
            buffer = self._buffer_of(layer)
            buffer.threads.add(thread)
            self._buffers.sort(key=lambda each: each is buffer)
            self.copies.wait(buffer.copied)
            self._fetch_ahead(layer.reference)
            if layer not in buffer.views:
                buffer.views[layer] = layer.views(layer.targets(buffer.bytes))
            return buffer.views[layer]

    def end(self) -> None:
        """Note that this thread has launched all that reads the layer."""
        with self._lock:
            self._end(threading.get_ident())

    def _end(self, thread: int) -> None:
        for buffer in self._buffers:
            if thread in buffer.threads:
                buffer.mark(self.copies)
                buffer.threads.discard(thread)

    def forget(self, layer: HostLayer) -> None:
        """Discard the layer's copy, because its bytes on the host are about to change."""
        self.copies.finish()
        with self._lock:
            for buffer in self._buffers:
                buffer.layer = None if buffer.layer is layer.reference else buffer.layer

    def _buffer_of(self, layer: HostLayer) -> _Buffer:
        if not self._buffers:
            nbytes = max(each.nbytes for reference in self._layers if (each := reference()) is not None)
            self._buffers = [_Buffer(self.copies, nbytes) for _ in range(2)]
        for buffer in self._buffers:
            if buffer.layer is layer.reference:
                return buffer
        free = [buffer for buffer in self._buffers if not buffer.threads]
        if not free:
            raise RuntimeError(BUSY)
        self._copy(layer, free[0])
        return free[0]

    def _copy(self, layer: HostLayer, buffer: _Buffer) -> None:
        buffer.layer = None  # until all is under way: an interrupt may come between
        self.copies.copy(layer.transfers(buffer.bytes), buffer.used.values(), buffer.copied)
        buffer.layer = layer.reference

    def _fetch_ahead(self, layer: Reference) -> None:
        before, last = self._last
        if layer is not last:
            if last is not None:
                self._next[self._last] = layer
            self._last = before, last = last, layer
        predicted = self._predict_next(before, layer)()
        if predicted is None or any(buffer.layer is predicted.reference for buffer in self._buffers):
            return
        free = [buffer for buffer in self._buffers if buffer.layer is not layer and not buffer.threads]
        if free:
            self._copy(predicted, free[0])

    def _predict_next(self, before: Reference | None, layer: Reference) -> Reference:
        """Predict the layer after two: the one that came last time, else the next one in their direction, which turns at
        the ends as backward does."""
        if (before, layer) in self._next:
            return self._next[before, layer]
        layers = [reference for reference in self._layers if reference() is not None]
        number = layers.index(layer)
        step = 1 if before not in layers[number:] else -1
        number += step
        if not 0 <= number < len(layers):
            number -= 2 * step
        return layers[number % len(layers)]
