"""The ranks that share a layer's experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from . import backends
from .dispatch import dispatch
from .routing import Routing


class Ranks(NamedTuple):
    """The ranks that share a layer's experts: expert e lives on rank e // num_local of the group."""

    group: dist.ProcessGroup
    rank: int
    size: int
    num_local: int

    @property
    def experts(self) -> slice:
        """Which of the layer's experts live here."""
        return slice(self.rank * self.num_local, (self.rank + 1) * self.num_local)

    def local(self, expert_index: torch.Tensor) -> torch.Tensor:
        """Expert ids counted from this rank's first; those of others lie outside 0 .. num_local - 1."""
        return expert_index - self.experts.start

    def routing(self, expert_index, weights, token_index, num_tokens: int) -> Routing:
        """The pairs with this rank's experts, whose ids are counted from the first of them, sorted."""
        backend = backends.choose(weights.device, None).name
        rows = dispatch(expert_index, num_tokens, self.num_local, token_index, sentinels=True, backend=backend)
        return Routing(
            expert_index, weights, token_index, sentinels=True, rows=rows, rows_backend=backend, is_local=True
        )
