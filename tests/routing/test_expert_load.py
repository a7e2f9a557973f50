"""The cost of counting a router's load: every operation is a kernel's launch on a GPU, in every layer."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sonicmoe_hf.routing.expert_load import TOTALS, ExpertLoad

VIEWS = ("view", "reshape", "slice", "select", "detach", "alias")


class Kernels(TorchDispatchMode):
    """Notes the operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if not name.endswith(VIEWS):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_rounding_that_fell_back_counts_top_ks_rows_and_no_change():
    index_TK, load = torch.tensor([[0, 1], [0, 2], [0, 1]]), ExpertLoad()
    rows_E = torch.tensor([4, 0, 0, 4])
    load.count(index_TK, 4, rows_E=rows_E, fell_back=torch.tensor(True), tile=4)
    assert load.take().tolist() == [3, 2, 1, 0, 1, 1, 1, 0, 0, 0]
    load.count(index_TK, 4, rows_E=rows_E, fell_back=torch.tensor(False), tile=4)
    assert load.take().tolist() == [4, 0, 0, 4, 1, 1, 0, 5, 3, (1 + 2 + 3) - 0]


def test_counting_a_forward_by_top_k_takes_few_kernels():
    torch.manual_seed(0)
    load, index_TK = ExpertLoad(), torch.rand(32, 8).topk(2).indices
    load.start(8, index_TK.device)
    with Kernels() as kernels:
        load.count(index_TK, 8)
    assert len(kernels.names) <= 5, kernels.names
    load.count(index_TK, 8, fell_back=True)
    counted = load.take()
    assert torch.equal(counted[:8], 2 * index_TK.flatten().bincount(minlength=8))
    assert counted[8:].tolist() == [2, 1, 1] + [0] * (len(TOTALS) - 3)
