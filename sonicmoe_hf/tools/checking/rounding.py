"""Rounding in a dtype, as noise on what the modules of a model put out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ...layer.experts_module import is_experts


@contextmanager
def rounded(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Change each module's output at random by as much as rounding in `dtype` may, inside the block.

    Rounding a weight changes a product by the same relative error as rounding the product, so this stands for both.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(module: Any, arguments: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        error = 2 * torch.rand(output.shape, generator=generator, dtype=torch.float32, device=device) - 1
        return (output.float() * (1 + error * (torch.finfo(dtype).eps / 2))).to(output.dtype)

    leaves = [module for module in model.modules() if not any(module.children()) or is_experts(module)]
    hooks = [module.register_forward_hook(perturb) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Choose the dtype with the larger steps."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)
