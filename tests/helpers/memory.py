"""Memory in use while something runs."""

import multiprocessing
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonicmoe_hf import PackedWeight

reads_peaks = pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads a process's peak there")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages from when an operation first touches them until they are freed; with `new_alone` of
    those that operations make, beside what was there before. now: the sum; peak: the largest that it was."""

    def __init__(self, new_alone=False):
        super().__init__()
        self.now = self.peak = 0
        self._new_alone, self._seen = new_alone, weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self._new_alone:  # what comes in was made before, as a weight that is first seen when it is transposed
            self._seen.update(_storages((args, kwargs)))
        else:
            self._count((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self._count(result)
        return result

    def _count(self, tree):
        for storage in _storages(tree):
            if storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
                self.peak = max(self.peak, self.now)

    def _free(self, nbytes):
        self.now -= nbytes


def _storages(tree):
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [each.untyped_storage() for each in tensors if not (isinstance(each, PackedWeight) or each.is_meta)]


def peak_bytes(make_inputs, forward) -> int:
    """Count the bytes that `forward(*inputs)` takes at most, beside its inputs, made by `make_inputs()` on FakeTensors,
    so that real sizes take no memory and no GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = make_inputs()
        with LiveBytes(new_alone=True) as new:
            forward(*inputs)
    return new.peak


def _memory(key):
    """Read VmRSS or VmHWM, its peak, of this process in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def _run_and_tell_peak(run, peak):
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    Path("/proc/self/clear_refs").write_text("5")  # the peak of what follows
    before = _memory("VmRSS")
    run()
    peak.send(_memory("VmHWM") - before)


def peak_of_a_process(run):
    """Measure the bytes that `run` takes in a forked process at most."""
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_run_and_tell_peak, args=(run, sender))
    process.start()
    assert receiver.poll(300)
    process.join()
    return receiver.recv()


def bytes_in(folder):
    """Count the bytes of a checkpoint's weights on disk."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
