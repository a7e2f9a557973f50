"""Layers with the same support and kernels, as ranges that a person can read: model.layers[0-47].mlp."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .support import LayerSupport

NUMBER = re.compile(r"\.(\d+)\.")  # the first one in a layer's name is the layer's


@dataclass(frozen=True)
class LayerRange:
    """Layers with the same support and kernels: `name` reads model.layers[0-47].mlp, [1, 3, ..., 47] or [1, 2, 5].
    `kernels`: what runs on the Hopper kernels there, None for layers that sonicmoe_hf does not compute and where those
    kernels' packages are missing."""

    name: str
    count: int
    support: LayerSupport
    kernels: str | None = None


def collapse(layers: list[LayerSupport], kernels: Mapping[str, str]) -> list[LayerRange]:
    """Join layers that differ only in their number to ranges. `kernels`: what LayerRange says, by layer."""
    runs = [list(run) for _, run in itertools.groupby(layers, lambda layer: _kind(layer, kernels))]
    return [LayerRange(_name(run), len(run), run[0], kernels.get(run[0].name)) for run in runs]


def _kind(layer: LayerSupport, kernels: Mapping[str, str]) -> tuple:
    """Make the key that layers of one range share. Reasons may name their layer."""
    name = NUMBER.sub(".[].", layer.name, count=1)
    return layer._replace(name=name, reason=layer.reason.replace(layer.name, name)), kernels.get(layer.name)


def _name(run: list[LayerSupport]) -> str:
    if len(run) == 1:
        return run[0].name
    numbers = [int(NUMBER.findall(layer.name)[0]) for layer in run]
    first, second, last = numbers[0], numbers[1], numbers[-1]
    if numbers == list(range(first, last + 1)):
        listed = f"{first}-{last}"
    elif len(run) > 2 and numbers == list(range(first, last + 1, second - first)):
        listed = f"{first}, {second}, ..., {last}"
    else:
        listed = ", ".join(map(str, numbers))
    return NUMBER.sub(f"[{listed}].", run[0].name, count=1)
