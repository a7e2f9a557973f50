"""Memory in use while something runs."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonicmoe_hf import PackedWeight

reads_peaks = pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="reads a process's peak there")


class LiveBytes(TorchDispatchMode):
    """Watches the bytes of all tensors that operations touch. peak: of those alive at once, after any operation."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, PackedWeight) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return result


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
