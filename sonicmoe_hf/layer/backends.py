"""The choice of the kernels that run: one detection, one decision, one override."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import NamedTuple, cast

import torch

from ..kernels.interface import Backend
from .config import check_choice

KERNELS = ("hopper", "triton")
BACKENDS = (*KERNELS, "eager")
NO_FASTER = "plain PyTorch, correct but no faster than without sonicmoe-hf"
BACKEND_VARIABLE = "SONICMOE_HF_BACKEND"
HOPPER_DTYPES = (torch.bfloat16, torch.float16)
HOPPER_PACKAGES = (  # module, how to install it
    ("triton", "triton is not installed (pip install 'sonicmoe-hf[hopper]')"),
    ("cutlass", "nvidia-cutlass-dsl is not installed (pip install 'sonicmoe-hf[hopper]')"),
    ("tvm_ffi", "apache-tvm-ffi is not installed (pip install 'sonicmoe-hf[hopper]')"),
)
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _cached_by_device(function):
    """Call the function once for every device; torch.compile takes the result for a constant and traces nothing of its
    making."""
    results = {}

    @torch.compiler.assume_constant_result
    def cached(device: torch.device):
        if device not in results:
            results[device] = function(device)
        return results[device]

    return cached


class Choice(NamedTuple):
    """A backend's name and why it was chosen."""

    name: str
    reason: str


def missing_for_hopper() -> str | None:
    """Name the package that the Hopper kernels lack here, with the remedy; None where they lack none."""
    return next((remedy for module, remedy in HOPPER_PACKAGES if importlib.util.find_spec(module) is None), None)


@_cached_by_device
def _why_not_triton(device: torch.device) -> str | None:
    """Say why the Triton kernels cannot run on `device`, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.version.cuda is None:
        return "this PyTorch is not built for CUDA"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"the GPU is sm_{major}{minor}; the Triton kernels need sm_80 or newer"


@_cached_by_device
def _why_not_hopper(device: torch.device) -> str | None:
    """Say why the Hopper kernels cannot run on `device`, or None if they can."""
    if obstacle := _why_not_triton(device):
        return obstacle
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"the GPU is sm_{major}{minor}; the Hopper kernels need sm_90"
    return missing_for_hopper()


def _obstacle(name: str, device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Say why the backend `name` cannot take these tensors, or None if it can."""
    if name == "eager":
        return None
    if name == "hopper":
        if dtype is not None and dtype not in HOPPER_DTYPES:
            return f"the dtype is {dtype}; the Hopper kernels take {', '.join(map(str, HOPPER_DTYPES))}"
        return _why_not_hopper(device)
    if dtype is not None and dtype not in TRITON_DTYPES:
        return f"the dtype is {dtype}; the Triton kernels take {', '.join(map(str, TRITON_DTYPES))}"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return _why_not_triton(device)


def choose(device: torch.device, dtype: torch.dtype | None, backend: str | None = None) -> Choice:
    """Choose the backend for tensors on `device`: `backend` if given, else SONICMOE_HF_BACKEND, else the best that fits.
    dtype: that of products; None for sorting and rounding of rows, which have none.

    Raises:
        ValueError: the name given is not a backend, or it cannot take these tensors.
    """
    for name, source in ((backend, "backend="), (os.environ.get(BACKEND_VARIABLE) or None, BACKEND_VARIABLE)):
        if name is not None:
            check_choice(source.rstrip("="), name, BACKENDS)
            if obstacle := _obstacle(name, device, dtype):
                request = f"{source.rstrip('=')} asks for {name!r}"
                raise ValueError(f"{request}, but {obstacle}; leave the choice to sonicmoe_hf, or use 'eager'")
            return Choice(name, f"asked for by {source}")
    if device.type != "cuda":
        return Choice("eager", f"{NO_FASTER}: the device is {device.type}")
    without_hopper = _obstacle("hopper", device, dtype)
    if without_hopper is None:
        return Choice("hopper", "CuTe DSL kernels for Hopper; products that they do not support fall back to Triton")
    if obstacle := _obstacle("triton", device, dtype):
        return Choice("eager", f"{NO_FASTER}: {obstacle}")
    return Choice("triton", f"Triton kernels: {without_hopper}")


@functools.cache
def load(name: str) -> Backend:
    """Load the module of a backend, imported when first used."""
    return cast(Backend, importlib.import_module(f"sonicmoe_hf.kernels.{name}"))
