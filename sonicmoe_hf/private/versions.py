"""The installed versions of the packages that we build on, and those that sonicmoe_hf was tested with."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Callable

import torch
from packaging.version import Version

PACKAGES = (
    "sonicmoe-hf",
    "torch",
    "transformers",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "accelerate",
    "peft",
    "datasets",
    "trl",
    "bitsandbytes",
    "liger-kernel",
)
# The oldest and the newest tested. pyproject.toml asks for the oldest; a newer one than the newest is used all the same,
# so that the next release of a package locks nobody out.
TESTED = {
    "torch": ("2.11", "2.15"),
    "transformers": ("5.17", "5.24"),
    "triton": ("3.6", "3.9"),
    "peft": ("0.20", "0.21"),
}
NOT_INSTALLED = "not installed"


@functools.cache
def versions() -> dict[str, str]:
    """Look up Python's version and those of PACKAGES, once; "not installed" where one is missing."""
    by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        by_package[package] = _installed(package)
    by_package["torch"] = torch.__version__
    return by_package


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def check_peft_version(check: Callable[[str], None], min_version: str) -> None:
    """Call Transformers' check of PEFT's version for add_adapter, set_adapter and such, which names no version that is
    installed.

    Raises:
        ValueError: PEFT is older than min_version, or not installed; with what works all the same.
    """
    try:
        check(min_version)
    except ValueError as error:
        raise ValueError(
            f"add_adapter, set_adapter and such methods of Transformers {_installed('transformers')} need PEFT "
            f"{min_version} or newer, and PEFT is {_installed('peft')}; use peft.get_peft_model(model, config), and "
            "peft.PeftModel.from_pretrained(model, folder), in their place"
        ) from error


def untested_versions() -> list[str]:
    """Write a sentence for each installed package whose version is outside the range that sonicmoe-hf was tested with."""
    sentences = []
    for package, (oldest, newest) in TESTED.items():
        installed = _installed(package)
        if installed == NOT_INSTALLED:
            continue
        release = Version(installed).release
        if release < Version(oldest).release:
            sentences.append(f"{package} {installed} is older than {oldest}, the oldest that sonicmoe-hf works with")
        elif release[:2] > Version(newest).release:
            sentences.append(
                f"{package} {installed} is newer than {newest}, the newest that sonicmoe-hf was tested with: if anything "
                f"fails, try {package} {newest}"
            )
    return sentences
