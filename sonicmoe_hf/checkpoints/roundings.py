"""Sums of what rounding to a format does to weights that an adapter changed, by weight and by layer."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch

LAYER = re.compile(r"^(.*?\.?layers\.\d+)\.")
UNMERGED = "serve the adapter beside the base, unmerged (sonicmoe-hf convert ADAPTER DST --layout vllm)"
PRODUCTS = (("error", "error"), ("change", "change"), ("error", "change"), ("weight", "weight"))  # that are summed
REMEDY = f"{UNMERGED}, or leave --quantize out and serve bf16"


class LayerRounding(NamedTuple):
    """The effect of rounding on one layer's changed weights.

    layer: its name. error: the norm of what rounding added to the changed weights. change: the norm of the adapter's
    change. survived: the share of the change that the rounded weights have, as the projection of theirs on it; 1 is all.
    """

    layer: str
    error: float
    change: float
    survived: float


class Roundings:
    """The sums of a conversion to a format, by weight."""

    def __init__(self, format: str):
        self._format = format
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, before: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Add a part of the weight `name`: as it was, with the change, and with the change and rounded."""
        parts = {"error": rounded - exact.float(), "change": exact.float() - before.float(), "weight": before.float()}
        sums = self._sums.setdefault(name, [0.0] * len(PRODUCTS))
        for place, (first, second) in enumerate(PRODUCTS):
            sums[place] += torch.sum(parts[first] * parts[second], dtype=torch.float64).item()

    def layers(self) -> list[LayerRounding]:
        """List layers that were changed, in the order of the weights; a weight of no layer stands for itself."""
        by_layer: dict[str, list[float]] = {}
        for name, sums in self._sums.items():
            match = LAYER.match(name)
            total = by_layer.setdefault(match[1] if match else name, [0.0] * len(PRODUCTS))
            total[:] = map(sum, zip(total, sums))
        return [
            LayerRounding(layer, math.sqrt(error), math.sqrt(change), 1 + both / change)
            for layer, (error, change, both, _) in by_layer.items()
            if change
        ]

    def notices(self) -> list[str]:
        """Say what a user should hear, in sentences."""
        layers = self.layers()
        if not layers:
            return [self._loss()] if self._sums else []
        worst = min(layers, key=lambda layer: layer.survived)
        lost = [layer for layer in layers if layer.survived < 0.5]
        ratios = sorted(layer.error / layer.change for layer in layers)
        notices = [
            f"rounding to {self._format} is {ratios[0]:.2g} to {ratios[-1]:.2g} times as large as the adapter's change, "
            f"of which at least {max(0.0, worst.survived):.0%} is left in each layer ({worst.layer} has the least)"
        ]
        if lost:
            notices.append(
                f"warning: rounding to {self._format} ate more than half of the adapter's change in {len(lost)} of "
                f"{len(layers)} layers: {REMEDY}"
            )
        return notices

    def _loss(self) -> str:
        """Say what rounding lost of weights that nothing changed, of which a part each was added."""
        errors, _, _, squares = map(sum, zip(*self._sums.values()))
        loss = math.sqrt(errors / squares) if squares else 0.0
        return (
            f"the experts are {self._format} now, and differ from the weights before by {loss:.1%} (root mean square, "
            "over the first expert of each weight)"
        )
