"""Checks that a mixture-of-experts block hands its router's indices on, which token rounding needs."""

import torch
from torch import nn


class Probe:
    """Stands in for a block's `self`: its router returns marks, and its experts note whether they arrive."""

    def __init__(self, block, router_attribute, hidden_size):
        self._block = block
        self._router_attribute = router_attribute
        self.hidden_states = torch.zeros(1, 1, hidden_size, device="meta")  # no values are looked at
        self.logits = torch.zeros(1, 1, device="meta")
        self.marks = (object(), object())
        self.received = []

    def __getattr__(self, name):
        if name == self._router_attribute:
            return lambda hidden_states, *args, **kwargs: (self.logits, *self.marks)
        if name == "experts":
            return self._experts
        value = getattr(self._block, name)
        return (lambda x, *args, **kwargs: x) if isinstance(value, nn.Module) else value

    def _experts(self, hidden_states, *args, **kwargs):
        self.received += [*args, *kwargs.values()]
        return hidden_states


def hands_indices_to_experts(block, family) -> bool:
    """Tell whether the block's own forward passes the router's weights and indices to its experts and does nothing
    else with them, which a mark could not stand."""
    probe = Probe(block, family.router_attribute, block.experts.config.hidden_size)
    type(block).forward(probe, probe.hidden_states)
    return all(any(value is mark for value in probe.received) for mark in probe.marks)
