"""Training loops of one's own under expert parallelism, where some parameters are sharded and others are whole."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The parameters in groups of those on one device mesh, and those on none: what an optimiser takes as its groups.
    Torch updates lists of tensors of one mesh."""
    groups = collections.defaultdict(list)
    for parameter in parameters:
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return list(groups.values())


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` (2-norm) for sharded parameters beside whole ones, which it does not take.

    Returns:
        The norm of the gradients of all experts and of everything else, the same on every rank.
    Example:
        clip_grad_norm_(model.parameters(), 1.0)
    """
    groups = by_mesh(parameter for parameter in parameters if parameter.grad is not None)
    norms: list[Any] = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total
