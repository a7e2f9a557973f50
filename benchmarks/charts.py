"""The README's chart, from the CSV of moe_layer.py: time and memory of one MoE layer beside other implementations.

    python benchmarks/charts.py [--results CSV] [--out PNG]

Writes docs/images/moe_layer.png. Needs matplotlib and no GPU.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = {  # as the CSV names it: (as the chart does, colour)
    "grouped_mm": ("grouped_mm (Transformers' default)", "#b8bcc4"),
    "ScatterMoE": ("ScatterMoE", "#858b97"),
    "sonicmoe (Transformers)": ("Transformers' sonicmoe", "#5b8fc7"),
    "hopper": ("sonicmoe-hf, Hopper kernels", "#e0712c"),
}
CONFIGS = {"7B": "7B of the paper", "Qwen3-30B-A3B": "Qwen3-30B-A3B", "OLMoE": "OLMoE", "gpt-oss-20b": "gpt-oss-20b"}
PANELS = {  # metric: (title, format of the bars' labels, factor)
    "ms": ("Forward and backward, ms", "{:.1f}", 1),
    "held_MB": ("Held for backward, GB", "{:.2f}", 1e-3),
}
BAR_WIDTH = 0.2


def read_medians(path: Path) -> tuple[dict[tuple[str, str, str], float], dict[str, str]]:
    """(config, contender, metric) -> median of eager forward+backward; and the columns that say where they come from.

    Raises:
        ValueError: the file mixes runs of several commits or GPUs.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    origins = {(row["gpu"], row["commit"]) for row in rows}
    if len(origins) != 1:
        raise ValueError(f"{path} mixes runs, {sorted(origins)}: compare figures of one commit and GPU only")
    medians = {
        (row["config"], row["contender"], row["metric"]): float(row["median"])
        for row in rows
        if row["mode"] == "forward+backward" and row["launch"] == "eager"
    }
    return medians, rows[0]


def draw_panel(axis, medians: dict[tuple[str, str, str], float], metric: str) -> None:
    """One group of bars a model, one bar a contender."""
    title, label, factor = PANELS[metric]
    for i, (contender, (name, colour)) in enumerate(CONTENDERS.items()):
        heights = [factor * medians[config, contender, metric] for config in CONFIGS]
        places = [group + (i - 1.5) * BAR_WIDTH for group in range(len(CONFIGS))]
        bars = axis.bar(places, heights, BAR_WIDTH * 0.92, color=colour, label=name)
        axis.bar_label(bars, [label.format(height) for height in heights], fontsize=7, padding=1)
    axis.set_xticks(range(len(CONFIGS)), CONFIGS.values(), fontsize=9)
    axis.set_title(title, fontsize=11, loc="left")
    axis.tick_params(axis="x", length=0)
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)


def draw(medians: dict[tuple[str, str, str], float], origin: dict[str, str], path: Path) -> None:
    """Both panels, with the legend above and the origin below."""
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 3.9))
    for axis, metric in zip(axes, PANELS):
        draw_panel(axis, medians, metric)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=len(CONTENDERS), frameon=False)
    conditions = f"One MoE layer, {origin['gpu']}, bf16, SwiGLU, random data and routing; commit {origin['commit']}"
    figure.text(0.5, 0.01, conditions, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.04, 1, 0.92))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "moe_layer.csv")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "moe_layer.png")
    options = parser.parse_args()
    draw(*read_medians(options.results), options.out)


if __name__ == "__main__":
    main()
