"""Sums of what rounding to a format does to weights that an adapter changed, by weight and by layer."""

from __future__ import annotations

import math
import re
import statistics
from typing import NamedTuple

import torch

LAYER = re.compile(r"^(.*?\.?layers\.\d+)\.")
UNMERGED = "serve the adapter beside the base, unmerged (sonicmoe-hf convert ADAPTER DST --layout vllm)"
PRODUCTS = (("error", "error"), ("change", "change"), ("error", "change"), ("weight", "weight"))  # that are summed
SERVE_UNROUNDED = f"{UNMERGED}, or leave --quantize out and serve bf16"
TO_NEAREST = f"merge it by --rounding dithered, or {UNMERGED}"  # where it was rounded to nearest
DITHERED = "dithered rounding"  # so called in the card of a folder


class LayerRounding(NamedTuple):
    """The effect of rounding on one layer's changed weights.

    layer: its name. error: the norm of what rounding added to the changed weights. change: the norm of the adapter's
    change. survived: the share of the change that the rounded weights have, as the projection of theirs on it; 1 is all.
    worst, median: that of the layer's single matrices, an expert's or a linear layer's.
    """

    layer: str
    error: float
    change: float
    survived: float
    worst: float
    median: float


class Roundings:
    """The sums of a conversion to a format, by matrix: an expert's, or a whole weight."""

    def __init__(self, format: str):
        self._format = format
        self._sums: dict[tuple[str, int | None], list[float]] = {}
        self._rounding, self._remedy = "rounding", SERVE_UNROUNDED

    def add(
        self,
        name: str,
        before: torch.Tensor,
        exact: torch.Tensor,
        rounded: torch.Tensor,
        expert: int | None = None,
        is_dithered: bool | None = None,
    ) -> None:
        """Add a matrix of the weight `name`: as it was, with the change, and with the change and rounded. expert: its
        number in a weight that holds all. is_dithered: how one is rounded that had the format already; None of others."""
        if is_dithered is not None:
            self._rounding, self._remedy = (DITHERED, SERVE_UNROUNDED) if is_dithered else ("rounding", TO_NEAREST)
        tensors = {
            "error": rounded - exact.float(),
            "change": exact.float() - before.float(),
            "weight": before.float(),
        }
        sums = self._sums.setdefault((name, expert), [0.0] * len(PRODUCTS))
        for number, (first, second) in enumerate(PRODUCTS):
            sums[number] += torch.sum(tensors[first] * tensors[second], dtype=torch.float64).item()

    def layers(self) -> list[LayerRounding]:
        """List layers that were changed, in the order of the weights; a weight of no layer stands for itself."""
        by_layer: dict[str, list[list[float]]] = {}
        for (name, _), sums in self._sums.items():
            match = LAYER.match(name)
            by_layer.setdefault(match[1] if match else name, []).append(sums)
        layers = []
        for layer, matrices in by_layer.items():
            error, change, both, _ = map(sum, zip(*matrices))
            if change:
                shares = [_surviving_share(sums) for sums in matrices if sums[1]]
                survived = 1 + both / change
                layers.append(
                    LayerRounding(
                        layer, math.sqrt(error), math.sqrt(change), survived, min(shares), statistics.median(shares)
                    )
                )
        return layers

    def notices(self) -> list[str]:
        """Say what a user should hear, in sentences."""
        layers = self.layers()
        if not layers:
            return [self._loss()] if self._sums else []
        shares = {matrix: _surviving_share(sums) for matrix, sums in self._sums.items() if sums[1]}
        (worst, expert), median = min(shares, key=shares.__getitem__), statistics.median(shares.values())
        matrix = worst if expert is None else f"expert {expert} of {worst}"
        lost = [layer for layer in layers if layer.survived < 0.5]
        ratios = sorted(layer.error / layer.change for layer in layers)
        notices = [
            f"of the adapter's change of a matrix {median:.0%} is left by {self._rounding} to {self._format} in the "
            f"median, and {min(shares.values()):.0%} in the worst, {matrix}; the rounding itself is "
            f"{_range(ratios)} times as large as the change of a layer"
        ]
        if lost:
            notices.append(
                f"warning: rounding to {self._format} ate more than half of the adapter's change in {len(lost)} of "
                f"{len(layers)} layers: {self._remedy}"
            )
        return notices

    def _loss(self) -> str:
        """Say what rounding lost of weights that no adapter changed, by the experts of them that `add` got."""
        errors, _, _, squares = map(sum, zip(*self._sums.values()))
        loss = math.sqrt(errors / squares) if squares else 0.0
        return (
            f"the experts are {self._format} now, and differ from the weights before by {loss:.1%} (root mean square, "
            "over the first expert of each weight)"
        )


def _range(ratios: list[float]) -> str:
    """Write the first and the last of sorted numbers, or one where both read alike."""
    return " to ".join(dict.fromkeys(f"{ratio:.2g}" for ratio in (ratios[0], ratios[-1])))


def _surviving_share(sums: list[float]) -> float:
    """Compute the share of the adapter's change that is in the rounded weight: 1 less what rounding takes back of it."""
    _, change, both, _ = sums
    return 1 + both / change
