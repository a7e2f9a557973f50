"""Numbers of bytes: of packed weights, of the layers that fit, and of the host's free memory."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ..kernels.packed import FORMATS, Quantized
from ..layer.kept import free_on_card

AUTO = "auto"
EXPERTS_MEMORY = 'experts_memory is {}; give the bytes of experts that stay on the GPU, such as "8GiB" or 0, or "auto"'
# Share of the card for adapters, activations and what the allocator cannot use, where experts_memory="auto".
LEFT_FREE = 0.25
PROC, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # cgroups of version 1 say so by a larger number


def packed_nbytes(
    format: str, shape: tuple[int, int, int], order: str = "whole", like: Quantized | None = None
) -> int:
    """Count the packed bytes of a weight [E, N, K] whose rows stand in an order of kernels.packed.ORDERS.

    like: another weight of the format, with as many values for a scale, and scales of the same dtype; None: what
        quantizing makes.
    Raises:
        ValueError: the format does not take a weight of this shape.
    """
    made = FORMATS[format]
    shapes = made.shapes(shape, order, None if like is None else made.group(like))
    total = 0
    for name, size, own in zip(Quantized._fields, shapes, like or [None] * len(shapes)):
        if size is not None:
            total += math.prod(size) * (made.dtypes(name)[0] if own is None else own.dtype).itemsize
    return total


def choose_resident(sizes: Sequence[int], budget: int) -> list[bool]:
    """Choose the layers, which have these sizes in bytes, that stay on the GPU: as many as the budget holds, evenly among
    the others, so that one layer's copy has the time of its neighbours too."""
    count = len(sizes)
    for kept in range(count, 0, -1):
        stays = [(number + 1) * kept // count > number * kept // count for number in range(count)]
        if sum(size for size, stay in zip(sizes, stays) if stay) <= budget:
            return stays
    return [False] * count


def bytes_for_auto(device: torch.device, others: int, largest: int) -> int:
    """Count the bytes of experts for experts_memory="auto": all that the card holds beside `others`, the bytes of weights
    that are not there yet, two buffers of the `largest` layer, and LEFT_FREE. Raises ValueError on a CPU."""
    if device.type != "cuda":
        raise ValueError(f'experts_memory="auto" fits a GPU, but the model is on {device}; give bytes, such as "8GiB"')
    total = torch.cuda.get_device_properties(device).total_memory
    return max(0, free_on_card(device) - others - 2 * largest - int(LEFT_FREE * total))


def free_on_host() -> int | None:
    """Count the bytes of host memory that are free, inside a container too; None where the system does not say."""
    free = [_available(), _bytes_left(CGROUP, "memory.max", "memory.current", "memory.stat")]
    free.append(_bytes_left(CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"))
    known = [nbytes for nbytes in free if nbytes is not None]
    return min(known) if known else None


def _available() -> int | None:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", PROC.read_text() if PROC.is_file() else "", re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


def _bytes_left(folder: Path, limit: str, used: str, statistics: str) -> int | None:
    """Count the bytes that a control group may still take; file caches are given up for it."""
    try:
        maximum, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
        caches = re.findall(r"^(?:in)?active_file (\d+)$", (folder / statistics).read_text(), re.MULTILINE)
    except OSError:
        return None
    if not maximum.isdigit() or int(maximum) >= UNLIMITED:
        return None
    return max(0, int(maximum) - now + sum(map(int, caches)))
