"""Training loops of one's own under expert parallelism, where some parameters are sharded and others are whole."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..layer.holding import mesh_of


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[dict[str, list[torch.Tensor]]]:
    """Group parameters for an optimiser by their device mesh, those on none together. Torch updates lists of tensors of
    one mesh.

    Example:
        optimizer = torch.optim.AdamW(by_mesh(model.parameters()), lr=1e-4)
    """
    groups = collections.defaultdict(list)
    for parameter in parameters:
        groups[mesh_of(parameter)].append(parameter)
    return [{"params": group} for group in groups.values()]


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_` (2-norm), which does not take sharded parameters beside whole ones.

    Returns:
        The norm of the gradients of all experts and of everything else, the same on every rank.
    Example:
        clip_grad_norm_(model.parameters(), 1.0)
    """
    groups = [group["params"] for group in by_mesh(p for p in parameters if p.grad is not None)]
    norms: list[Any] = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = (
        torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float32, device="cpu")
    )
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total
