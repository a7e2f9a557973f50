"""The demo's picture of its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9711c", "#8a8a8a"


class Curve(NamedTuple):
    """A line: optimiser steps and the value at each."""

    steps: list[int]
    values: list[float]


def draw_loss(path: Path, train: Curve, held_out: Curve, uniform: float, training: str, tokens_per_step: int) -> None:
    """Draw the loss over training. `uniform` is the loss of guessing every token with equal probability."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(uniform, color=GREY, linestyle=":", linewidth=1.2)
    beside: dict[str, Any] = {"textcoords": "offset points", "xycoords": ("axes fraction", "data"), "ha": "right"}
    axes.annotate(
        f"guessing: ln(vocabulary) = {uniform:.2f}", (1, uniform), xytext=(-4, -12), color=GREY, fontsize=9, **beside
    )
    axes.plot(train.steps, train.values, color=BLUE, linewidth=1.8, label=f"training batches ({training})")
    axes.plot(
        held_out.steps, held_out.values, "o-", color=ORANGE, linewidth=1.2, label="held-out files (top-k routing)"
    )
    for end, side in ((0, "left"), (-1, "right")):
        above: dict[str, Any] = {"xytext": (4, 9), "textcoords": "offset points", "ha": side, "fontweight": "bold"}
        point = held_out.steps[end], held_out.values[end]
        axes.annotate(f"{held_out.values[end]:.2f}", point, color=ORANGE, **above)
    axes.set_xlabel(f"optimiser step ({tokens_per_step:,} tokens each)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Qwen3-MoE architecture from scratch on Python's standard library", loc="left", fontsize=12)
    lowest, highest = (f(*train.values, *held_out.values, uniform) for f in (min, max))
    axes.set_ylim(lowest - 0.8, highest + 0.5)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=140)
