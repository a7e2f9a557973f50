"""The installed versions of what we build on."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

PACKAGES = (
    "sonicmoe-hf", "torch", "transformers", "triton", "nvidia-cutlass-dsl", "accelerate", "peft", "datasets", "trl",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Python's version and those of the packages that matter; "not installed" where one is missing."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_package[package] = "not installed"
    by_package["torch"] = torch.__version__
    return by_package
