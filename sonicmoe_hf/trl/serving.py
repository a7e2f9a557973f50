"""Serving: how a trainer's rollouts are to be sampled by vLLM, as its user asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..trainer.mixed_precision import computing_dtype

FOLDER = "adapters_for_vllm"  # in the trainer's output_dir


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The options of `vllm_adapters`, which says what each does."""

    replay: bool = True
    vllm_options: Mapping[str, Any] = field(default_factory=dict)
    served_base: str | os.PathLike | None = None
    adapters_folder: str | os.PathLike | None = None
    divergence_every: int = 1

    def __post_init__(self):
        if self.divergence_every < 0:
            raise ValueError(f"divergence_every is {self.divergence_every}; give a number of rollouts, or 0 for never")

    def folder(self, output_dir: str | os.PathLike) -> Path:
        """Find the folder in which adapters are written for vLLM."""
        return Path(self.adapters_folder or Path(output_dir) / FOLDER).expanduser().absolute()


def dtype_of(model: nn.Module, mixed_precision: str) -> torch.dtype:
    """Choose the dtype that a trainer computes in, of a model whose packed weights say nothing of it."""
    weights = next(parameter.dtype for parameter in model.parameters() if parameter.dtype.itemsize > 1)
    return computing_dtype(weights, mixed_precision)


def name_of(dtype: torch.dtype) -> str:
    """Find vLLM's name of a dtype."""
    return str(dtype).removeprefix("torch.")
