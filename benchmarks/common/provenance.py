"""Provenance of a figure: the commit, and the versions of the packages that take part."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path

import torch

COMMIT_VARIABLE = "SONICMOE_HF_COMMIT"  # for a machine that has the files and not the repository
PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "transformers",
    "safetensors",
    "peft",
    "liger-kernel",
    "torchao",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
)
PEERS = ("sonic_moe", "scattermoe", "scattermoe_lora", "unsloth_zoo")  # sources, which are no distributions


def commit() -> str:
    """Name the commit of the working tree, with "-dirty" where files differ from it; SONICMOE_HF_COMMIT wins."""
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
        return result.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> str:
    """List "torch 2.11.0, triton 3.6.0, ...", of the packages installed here; peers with the digest of their
    sources."""
    installed = []
    for package in PACKAGES:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    installed += [f"{name} {_digest(spec.origin)}" for name in PEERS if (spec := importlib.util.find_spec(name))]
    return ", ".join(installed)


def columns() -> dict[str, str]:
    """Make the columns that name the origin of a CSV's row."""
    return {"commit": commit(), "versions": versions(), "date": datetime.date.today().isoformat()}


def gpu() -> str:
    """Name the GPU, for the column "gpu"; "none" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _digest(origin: str) -> str:
    digest = hashlib.sha256()
    folder = Path(origin).parent
    for source in sorted(folder.rglob("*.py")):
        digest.update(str(source.relative_to(folder)).encode() + source.read_bytes())
    return digest.hexdigest()[:12]
