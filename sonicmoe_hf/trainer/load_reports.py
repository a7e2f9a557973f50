"""Reports of ExpertLoadCallback beside its metrics: a picture at the end of training, histograms for reporters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers.integrations import TensorBoardCallback, WandbCallback

from ..kernels.announce import is_first_rank

HISTOGRAMS = "moe/rows_per_expert"
RED = "#b2182b"
MAX_RATIO = 4  # load over the mean that has the darkest colour
INCHES_PER_LAYER = 0.25


def check_drawable(path: Path) -> None:
    """Raise before training where there would be no picture after it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed. ValueError: it draws no files of this name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{str(path)!r} is no picture; name a file with one of the endings {', '.join(known)}")


def draw_history(path: Path, history: list[dict]) -> None:
    """Draw the load of every expert over training, and of the busiest in the worst layer.

    Args:
        path: of the picture; its folder is made. history: ExpertLoadCallback's, one log or more.
    """
    from matplotlib.figure import Figure

    loads = load_by_layer(history)
    height = min(4 + INCHES_PER_LAYER * len(loads), 24)
    figure = Figure(figsize=(12, 2.2 + height), layout="constrained")
    busiest_axes, time_axes = figure.subplots(2, 1, height_ratios=(2.2, height), sharex=True)
    steps = [entry["step"] for entry in history]
    busiest_axes.plot(steps, [entry["moe/load_max_over_mean"] for entry in history], color=RED, linewidth=1.6)
    busiest_axes.axhline(1, color="grey", linestyle=":", linewidth=1)
    busiest_axes.set_title("The load of the busiest expert over its layer's mean, in the worst layer", loc="left")
    busiest_axes.set_ylabel("pairs / mean")
    busiest_axes.set_ylim(bottom=0)
    busiest_axes.spines[["top", "right"]].set_visible(False)
    draw_experts(figure, time_axes, loads, steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def load_by_layer(history: list[dict]) -> dict[str, np.ndarray]:
    """Make {layer: load [logs, experts]} of the history."""
    names = history[0]["rows_per_expert"]
    return {name: np.array([entry["rows_per_expert"][name] for entry in history]) for name in names}


def draw_experts(figure, axes, loads: dict[str, np.ndarray], steps: list[int]) -> None:
    """Draw one line of pixels per expert, layer under layer, over training steps. loads: as of `load_by_layer`."""
    from matplotlib.colors import TwoSlopeNorm

    ratios = []
    for load in loads.values():
        busiest_first = np.argsort(-load[-max(1, len(load) // 4) :].sum(axis=0))
        load = load[:, busiest_first]
        ratios.append((load / np.maximum(load.mean(axis=1, keepdims=True), 1)).T)
    ends = np.cumsum([len(ratio) for ratio in ratios])
    first_interval = steps[1] - steps[0] if len(steps) > 1 else steps[0]
    edges = [max(0, steps[0] - first_interval), *steps]
    image = axes.pcolormesh(
        edges, np.arange(ends[-1] + 1), np.concatenate(ratios), cmap="RdBu_r", norm=TwoSlopeNorm(1, 0, MAX_RATIO)
    )
    axes.invert_yaxis()
    for end in ends[:-1]:
        axes.axhline(end, color="white", linewidth=4 if len(ratios) <= 8 else 1)
    axes.set(xlabel="optimiser step", ylabel="experts, the busiest at the end on top, not by number")
    axes.set_yticks(ends - np.diff(ends, prepend=0) / 2, labels_of(list(loads)))
    axes.set_title("The load of every expert over training (red: above its layer's mean)", loc="left", fontsize=12)
    figure.colorbar(image, ax=axes, label="pairs / mean pairs per expert of the layer", pad=0.01, extend="max")


def labels_of(names: list[str]) -> list[str]:
    """Shorten to the layers' numbers, where their names differ in these alone: "layer 3" of "model.layers.3.mlp"."""
    numbers = [[word for word in name.split(".") if word.isdecimal()] for name in names]
    labels = [f"layer {number[0]}" for number in numbers if len(number) == 1]
    return labels if len(set(labels)) == len(names) else names


def send_histograms(trainer, entry: dict) -> None:
    """Send the Trainer's TensorBoard and W&B the load of a log: a histogram over the experts of each layer."""
    if not is_first_rank():
        return
    wandb: Any = sys.modules.get("wandb")  # its callback has imported it
    loads = {f"{HISTOGRAMS}/{layer}": np.array(load) for layer, load in entry["rows_per_expert"].items()}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            for name, load in loads.items():
                callback.tb_writer.add_histogram(name, load, entry["step"])
        elif isinstance(callback, WandbCallback) and getattr(wandb, "run", None) is not None:
            histograms = {name: wandb.Histogram(load) for name, load in loads.items()}
            wandb.log({**histograms, "train/global_step": entry["step"]})
