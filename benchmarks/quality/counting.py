"""Rows per expert of the small models of training.py: counted while they train and are evaluated."""

from __future__ import annotations

from functools import partial

import torch

from sonicmoe_hf.layer.routing import Routing
from sonicmoe_hf.patching.moe_layers import find_layers


class RowCounter:
    """Rows of every expert and calls that gave it none, int64 [layers, E], and the rows of each call's busiest expert,
    summed over the calls, int64 [layers], since `reset`. It adds in place, so that a CUDA graph's replays count too."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        self.rows = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.starved = torch.zeros_like(self.rows)
        self.busiest = self.rows.new_zeros(num_layers)

    def reset(self) -> None:
        for tensor in (self.rows, self.starved, self.busiest):
            tensor.zero_()

    def count(self, layer: int, experts, args) -> None:
        """Count rows, as forward pre-hook of an experts module."""
        index_P = (args[1].expert_index if isinstance(args[1], Routing) else args[1]).reshape(-1).long()
        rows_E = index_P.new_zeros(self.rows.shape[1] + 1)  # + 1: the sentinel
        rows_E = rows_E.scatter_add_(0, index_P, torch.ones_like(index_P))[:-1]
        self.rows[layer] += rows_E
        self.starved[layer] += rows_E == 0
        self.busiest[layer] += rows_E.max()

    def read_counts(self) -> list[torch.Tensor]:
        """Copy (rows, starved, busiest) to the CPU."""
        return [tensor.cpu().clone() for tensor in (self.rows, self.starved, self.busiest)]


def attach_counter(model, num_experts: int, device: torch.device) -> RowCounter:
    """Make a counter, and count the rows of the model's layers with experts in it from now on."""
    layers = list(find_layers(model))
    counter = RowCounter(len(layers), num_experts, device)
    for number, layer in enumerate(layers):
        layer.experts.register_forward_pre_hook(partial(counter.count, number))
    return counter
