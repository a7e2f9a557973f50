"""A copy engine for CPUs that knows what GPUs allow: which of two streams' works may overlap, from the events alone.

Copies end as late as they may: their bytes arrive when the computing stream waits for them, and until then the buffer
holds garbage. Each stream counts its works and knows up to which work of the other it has waited, as a race detector
does.
"""

from typing import ClassVar

import pytest
import torch

from sonicmoe_hf.kernels import eager
from sonicmoe_hf.layer import products
from sonicmoe_hf.layer.projection import Projection
from sonicmoe_hf.streaming import copies as copies_module

GARBAGE = 0x7F  # bytes of NaN in bf16 and FP8, of no small value in the others


class Hazard(AssertionError):
    """Two works that touch one buffer have no order."""


class Event:
    """An event, with what had been done in each stream where it was set."""

    def __init__(self):
        self.reached = None


class Buffer:
    """Memory of a buffer. written, read: the last work of the copying stream that wrote to it, and of the computing
    stream that read it."""

    def __init__(self, memory, read):
        self.memory, self.written, self.read = memory, 0, read

    def holds(self, tensor):
        return 0 <= tensor.data_ptr() - self.memory.data_ptr() < self.memory.nbytes


class LateCopies:
    """The copy engine of this module, in the place of those of `streaming.copies`.

    log: ("copy", number of the buffer, address of the source), ("read", number of the buffer) and ("over the bus",
    address of the pinned memory). reading: memory that work may be reading over the bus.
    """

    every: ClassVar[list["LateCopies"]] = []

    def __init__(self, device):
        self.computing, self.copying = {"compute": 0, "copy": 0}, {"compute": 0, "copy": 0}
        self.buffers, self.pinned, self.queue, self.log, self.finished = [], {}, [], [], 0
        self.mappings, self.reading = {}, set()
        LateCopies.every.append(self)

    def pin(self, host):
        self.pinned[host.data_ptr()] = host.nbytes

    def unpin(self, host):
        if any(source.data_ptr() == host.data_ptr() for transfers, _ in self.queue for _, source in transfers):
            raise Hazard("unpinned while a copy from it is under way")
        if host.data_ptr() in self.reading:
            raise Hazard("unpinned while it is read over the bus")
        del self.pinned[host.data_ptr()]
        self.mappings.pop(host.data_ptr(), None)

    def map(self, host):
        assert host.data_ptr() in self.pinned, "kernels read no memory that is not pinned"
        self.mappings[host.data_ptr()] = host.nbytes
        return host

    def buffer(self, nbytes):
        self.computing["compute"] += 1  # whoever had the memory before
        self.buffers.append(Buffer(torch.empty(nbytes, dtype=torch.uint8), self.computing["compute"]))
        return self.buffers[-1].memory

    def event(self):
        return Event()

    def mark(self, event):
        event.reached = dict(self.computing)

    def copy(self, transfers, after, done):
        for event in after:
            self._advance(self.copying, event)
        self.copying["copy"] += 1
        transfers = list(transfers)
        for target, source in transfers:
            assert source.data_ptr() in self.pinned, "a copy from memory that is not pinned waits for the host"
            (number,) = [number for number, each in enumerate(self.buffers) if each.holds(target)]
            buffer = self.buffers[number]
            if buffer.read > self.copying["compute"]:
                raise Hazard("a buffer is overwritten while it may be in use")
            buffer.written = self.copying["copy"]
            target.fill_(GARBAGE)
            self.log.append(("copy", number, source.data_ptr()))
        done.reached = dict(self.copying)
        self.queue.append((transfers, self.copying["copy"]))

    def wait(self, done):
        self._advance(self.computing, done)
        self._arrive(done.reached["copy"])

    def timeline(self):
        return 0

    def finish(self):
        self.finished += 1
        self.reading.clear()
        self._arrive(self.copying["copy"])

    def read(self, tensor):
        """Note that work of the computing stream reads a tensor, of a buffer or not."""
        for number, buffer in enumerate(self.buffers):
            if buffer.holds(tensor):
                if buffer.written > self.computing["copy"]:
                    raise Hazard("a buffer is read before its copy has ended")
                self.computing["compute"] += 1
                buffer.read = self.computing["compute"]
                self.log.append(("read", number))
        for start, nbytes in self.mappings.items():
            if 0 <= tensor.data_ptr() - start < nbytes:
                self.reading.add(start)
                self.log.append(("over the bus", start))

    @staticmethod
    def _advance(stream, event):
        for name, done in (event.reached or {}).items():
            stream[name] = max(stream[name], done)

    def _arrive(self, until):
        while self.queue and self.queue[0][1] <= until:
            transfers, _ = self.queue.pop(0)
            for target, source in transfers:
                target.copy_(source)


@pytest.fixture
def late_copies(monkeypatch):
    """Make LateCopies copy experts in host memory, and check every read of a layer's weights."""
    monkeypatch.setitem(copies_module.KINDS, "cpu", LateCopies)
    monkeypatch.setattr(LateCopies, "every", [])
    for name in ("weight", "operand"):
        monkeypatch.setattr(products.Layer, name, _reading(getattr(products.Layer, name)))
    monkeypatch.setattr(eager, "dequantize", _reading(eager.dequantize))
    return LateCopies


def _reading(function):
    """Note the reading of what a call's arguments hold of a weight: the projection, or the stored codes."""

    def run(*arguments):
        weight = next(
            getattr(each, "weight", each) for each in arguments if isinstance(each, (Projection, torch.Tensor))
        )
        for engine in LateCopies.every:
            engine.read(weight)
        return function(*arguments)

    return run
