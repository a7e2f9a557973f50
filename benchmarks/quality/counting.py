"""Rows per expert of the small models of training.py: counted while they train and are evaluated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sonicmoe_hf.layer.routing import Routing
from sonicmoe_hf.patching.support import find_layers


class RowCounter:
    """Forward pre-hook of an experts module: rows of every expert, and calls that gave it none, since `reset`.

    It adds in place, so that a CUDA graph's replays count too. rows_E, starved_E: int64 [E]. busiest: int64, the rows of
    each call's busiest expert, summed over the calls.
    """

    def __init__(self, num_experts: int, device: torch.device):
        self.rows_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.starved_E = torch.zeros_like(self.rows_E)
        self.busiest = self.rows_E.new_zeros(())

    def reset(self) -> None:
        for tensor in (self.rows_E, self.starved_E, self.busiest):
            tensor.zero_()

    def __call__(self, experts, args):
        index_P = (args[1].expert_index if isinstance(args[1], Routing) else args[1]).reshape(-1).long()
        rows_E = index_P.new_zeros(len(self.rows_E) + 1)  # + 1: the sentinel
        rows_E = rows_E.scatter_add_(0, index_P, torch.ones_like(index_P))[:-1]
        self.rows_E += rows_E
        self.starved_E += rows_E == 0
        self.busiest += rows_E.max()


class Counts(NamedTuple):
    """What counters counted, on the CPU: rows and calls without rows [layers, E]; the busiest experts' rows [layers]."""

    rows: torch.Tensor
    starved: torch.Tensor
    busiest: torch.Tensor


def counted(counters: list[RowCounter]) -> Counts:
    """The counters' counts."""
    names = ("rows_E", "starved_E", "busiest")
    return Counts(*(torch.stack([getattr(counter, name) for counter in counters]).cpu() for name in names))


def count_rows(model, num_experts: int, device: torch.device) -> list[RowCounter]:
    """Counters of the model's layers with experts."""
    counters = []
    for layer in find_layers(model):
        counters.append(RowCounter(num_experts, device))
        layer.experts.register_forward_pre_hook(counters[-1])
    return counters
