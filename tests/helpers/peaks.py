"""Peak bytes of a forward and backward at real sizes, counted on FakeTensors: no memory is taken, and no GPU."""

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make, from when they are made until they are freed; what was there
    before does not count. now: the sum; peak: the largest that it was."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._seen.update(
            _storages((args, kwargs))
        )  # made before, as a weight that is first seen when it is transposed
        out = function(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
                self.peak = max(self.peak, self.now)
        return out

    def _free(self, nbytes):
        self.now -= nbytes


def _storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_bytes(make_inputs, forward) -> int:
    """Count the bytes that `forward(*inputs)` takes at most, beside its inputs, made on FakeTensors by `make_inputs()`."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = make_inputs()
        with NewBytes() as new:
            forward(*inputs)
    return new.peak
