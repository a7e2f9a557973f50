"""The demo's two pictures."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ..trainer.load_reports import draw_experts

ROWS_COLOURS = matplotlib.colormaps["Blues"]
BLUE, ORANGE, GREY = "#1f5fa8", "#d9711c", "#8a8a8a"


class Curve(NamedTuple):
    """A line: optimiser steps and the value at each."""

    steps: list[int]
    values: list[float]


class Rounded(NamedTuple):
    """Rows per expert of one batch, [layers, experts]: as top-k routes it, and after token rounding."""

    before: np.ndarray
    after: np.ndarray
    tile: int

    def padding(self) -> tuple[int, int]:
        """Rows that tiles of `tile` would compute for nothing, before and after."""
        return int((-self.before % self.tile).sum()), int((-self.after % self.tile).sum())


def draw_loss(path: Path, train: Curve, held_out: Curve, uniform: float, training: str, tokens_per_step: int) -> None:
    """Loss over training. `uniform` is the loss of guessing every token with equal probability."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(uniform, color=GREY, linestyle=":", linewidth=1.2)
    axes.annotate(f"guessing: ln(vocabulary) = {uniform:.2f}", (1, uniform), xytext=(-4, -12), color=GREY, fontsize=9,
                  textcoords="offset points", xycoords=("axes fraction", "data"), ha="right")  # fmt: skip
    axes.plot(train.steps, train.values, color=BLUE, linewidth=1.8, label=f"training batches ({training})")
    axes.plot(
        held_out.steps, held_out.values, "o-", color=ORANGE, linewidth=1.2, label="held-out files (top-k routing)"
    )
    for end, side in ((0, "left"), (-1, "right")):
        axes.annotate(f"{held_out.values[end]:.2f}", (held_out.steps[end], held_out.values[end]), xytext=(4, 9),
                      textcoords="offset points", color=ORANGE, ha=side, fontweight="bold")  # fmt: skip
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


def draw_load(path: Path, rounded: Rounded, history: dict[str, np.ndarray], steps: list[int]) -> None:
    """Rows per expert: one batch before and after rounding, and every expert's load over training.

    `history` is {layer: [logged steps, experts]}, rows summed between logs.
    """
    figure = Figure(figsize=(15, 10.5), layout="constrained")
    before_axes, after_axes, time_axes = figure.subplots(3, 1, height_ratios=(1, 1, 2.1))
    wasted_before, wasted_after = rounded.padding()
    total = rounded.before.sum()
    top = max(rounded.before.max(), rounded.after.max())
    tile = rounded.tile
    image = _draw_rows(before_axes, rounded.before, top, tile)
    before_axes.set_title(
        f"Top-k routing of one batch: {total:,} rows, and {wasted_before:,} more computed as padding "
        f"({wasted_before / total:.1%}) by tiles of {tile} rows",
        loc="left",
        fontsize=12,
    )
    _draw_rows(after_axes, rounded.after, top, tile)
    after_axes.set_title(
        f"The same batch after token rounding: {rounded.after.sum():,} rows, all in whole tiles; padding {wasted_after}",
        loc="left",
        fontsize=12,
    )
    figure.colorbar(image, ax=[before_axes, after_axes], label="rows of the expert (tokens routed to it)", pad=0.01)
    draw_experts(figure, time_axes, history, steps)
    figure.savefig(path, dpi=120)


def _draw_rows(axes, rows: np.ndarray, top: int, tile: int):
    """One heat map, layers x experts, each cell with its count; whole tiles in bold."""
    layers, experts = rows.shape
    image = axes.imshow(rows, cmap=ROWS_COLOURS, vmin=0, vmax=top, aspect="auto")
    for layer in range(layers):
        for expert in range(experts):
            count = int(rows[layer, expert])
            axes.text(expert, layer, count, ha="center", va="center", fontsize=7.5,
                      color="white" if count > 0.55 * top else "black",
                      fontweight="bold" if count % tile == 0 else "normal")  # fmt: skip
    axes.set(xlabel="expert", ylabel="layer", yticks=range(layers), xticks=range(0, experts, max(1, experts // 16)))
    return image
