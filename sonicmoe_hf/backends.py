"""Which kernels run: one detection, one decision, one override."""

from __future__ import annotations

import importlib
import os
from typing import NamedTuple

import torch

from .config import check_choice

BACKENDS = ("eager",)
VARIABLE = "SONICMOE_HF_BACKEND"


class Choice(NamedTuple):
    """A backend's name and why it was chosen."""

    name: str
    reason: str


def choose(device: torch.device, dtype: torch.dtype, backend: str | None = None) -> Choice:
    """The backend for tensors on `device`: `backend` if given, else SONICMOE_HF_BACKEND, else the best that fits.

    Raises:
        ValueError: the name given is not a backend.
    """
    del dtype  # every backend so far takes every float dtype
    if backend is not None:
        check_choice("backend", backend, BACKENDS)
        return Choice(backend, "asked for by backend=")
    if variable := os.environ.get(VARIABLE):
        check_choice(VARIABLE, variable, BACKENDS)
        return Choice(variable, f"asked for by {VARIABLE}")
    if device.type == "cuda":
        return Choice("eager", "plain PyTorch: this release has no GPU kernels yet")
    return Choice("eager", f"plain PyTorch: the device is {device.type}")


def load(name: str):
    """The module of a backend, imported when first used; its functions are listed in kernels/interface.py."""
    return importlib.import_module(f"sonicmoe_hf.kernels.{name}")
