"""What is in memory while something runs."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonicmoe_hf import PackedWeight


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors alive at once, as seen after every operation."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, PackedWeight) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.live.values()))
        return result
