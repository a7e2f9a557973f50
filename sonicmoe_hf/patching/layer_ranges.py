"""Layers that get the same, as ranges that a person can read: model.layers[0-47].mlp."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .support import LayerSupport

NUMBER = re.compile(r"\.(\d+)\.")  # the first one in a layer's name is the layer's


@dataclass(frozen=True)
class LayerRange:
    """Layers, at equal distances, that get the same: `name` reads model.layers[0-47].mlp, or [1, 3, ..., 47]. `kernels`:
    what runs on the Hopper kernels there, None for layers that sonicmoe_hf does not compute and where those kernels'
    packages are missing."""

    name: str
    count: int
    support: LayerSupport
    kernels: str | None = None


def collapse(layers: list[LayerSupport], kernels: Mapping[str, str]) -> list[LayerRange]:
    """Layers that differ only in their number, as ranges. `kernels`: what LayerRange says, by layer."""
    runs: list[list[LayerSupport]] = []
    for layer in layers:
        if runs and _continues(runs[-1], layer, kernels):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [LayerRange(_name(run), len(run), run[0], kernels.get(run[0].name)) for run in runs]


def _continues(run: list[LayerSupport], layer: LayerSupport, kernels: Mapping[str, str]) -> bool:
    if _kind(run[0], kernels) != _kind(layer, kernels) or not NUMBER.search(layer.name):
        return False
    return len(run) == 1 or _number(layer) - _number(run[-1]) == _number(run[1]) - _number(run[0])


def _kind(layer: LayerSupport, kernels: Mapping[str, str]) -> tuple:
    """What layers of one range share. Reasons may name their layer."""
    name = NUMBER.sub(".[].", layer.name, count=1)
    return layer._replace(name=name, reason=layer.reason.replace(layer.name, name)), kernels.get(layer.name)


def _number(layer: LayerSupport) -> int:
    return int(NUMBER.findall(layer.name)[0])


def _name(run: list[LayerSupport]) -> str:
    if len(run) == 1:
        return run[0].name
    first, second, last = _number(run[0]), _number(run[1]), _number(run[-1])
    numbers = f"{first}-{last}" if second == first + 1 else f"{first}, {second}, ..., {last}"
    if len(run) == 2 and second != first + 1:
        numbers = f"{first}, {second}"
    return NUMBER.sub(f"[{numbers}].", run[0].name, count=1)
