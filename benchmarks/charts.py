"""The charts of README.md and docs/performance.md: one MoE layer beside other implementations, from moe_layer.csv, whole
training steps, from train_step.csv, and steps of few tokens, from small_batches.csv.

    python -m benchmarks.charts [--results FOLDER] [--out FOLDER]

Writes moe_layer.png, train_step.png and small_batches.png to docs/images. Needs matplotlib and no GPU.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot, ticker

from benchmarks.common.command import RESULTS, ROOT
from benchmarks.common.table import read_rows

CONTENDERS = {  # as the CSVs name it: (as the chart does, colour)
    "grouped_mm": ("grouped_mm (Transformers' default)", "#b8bcc4"),
    "ScatterMoE": ("ScatterMoE", "#858b97"),
    "sonicmoe (Transformers)": ("Transformers' sonicmoe", "#5b8fc7"),
    "hopper": ("sonicmoe-hf, Hopper kernels", "#e0712c"),
    "sonicmoe-hf": ("sonicmoe-hf", "#e0712c"),
}
GROUP_WIDTH = 0.8
EXECUTIONS = {"eager": ":", "layers": "--", "reduce-overhead": "-"}
BUSY = ("ms", "busy_ms")


class Chart(NamedTuple):
    """A chart of the rows of one CSV.

    name: of the CSV and of the picture. rows: what the CSV's rows have in common. configs: (config, launch) -> the
    group's name. panels: metric -> (title, format of the bars' labels, factor). conditions: below the chart, before where
    its figures come from.
    """

    name: str
    rows: dict[str, str]
    configs: dict[tuple[str, str], str]
    panels: dict[str, tuple[str, str, float]]
    conditions: str


LAYER = Chart(
    "moe_layer",
    {"mode": "forward+backward", "launch": "eager"},
    {
        ("7B", "eager"): "7B of the paper",
        ("Qwen3-30B-A3B", "eager"): "Qwen3-30B-A3B",
        ("OLMoE", "eager"): "OLMoE",
        ("gpt-oss-20b", "eager"): "gpt-oss-20b",
    },
    {
        "ms": ("Forward and backward, ms", "{:.1f}", 1),
        "held_MB": ("Held for backward, GB", "{:.2f}", 1e-3),
    },
    "One MoE layer, {gpu}, bf16, SwiGLU, random data and routing; commit {commit}",
)
STEP = Chart(
    "train_step",
    {"mode": "full"},
    {
        ("7B", "Liger, spread load"): "7B of the paper\nwhole",
        ("7B", "Liger, spread load, FSDP2, 2 GPUs"): "7B, FSDP2\non two GPUs",
        ("Qwen3-30B-A3B", "Liger, spread load"): "Qwen3-30B-A3B\n16 layers",
        ("OLMoE-1B-7B", "spread load"): "OLMoE-1B-7B\nwhole",
        ("gpt-oss-20b", "Liger, spread load"): "gpt-oss-20b\n8 layers",
    },
    {
        "tokens_per_s": ("Training, thousand tokens a second and GPU", "{:.0f}", 1e-3),
        "peak_GiB": ("Peak memory, GiB", "{:.0f}", 1),
    },
    "Whole steps, all weights trained in bf16 with AdamW, Liger's other kernels (not for OLMoE), {gpu}, random weights, "
    "balanced rows per expert; commit {commit}",
)


def read_medians(path: Path, chart: Chart) -> tuple[dict[tuple[str, str, str, str], float], dict[str, str]]:
    """Read (config, launch, contender, metric) -> median of the chart's rows; and the columns that say where they
    come from.

    Raises:
        ValueError: the file mixes runs of several commits or GPUs.
    """
    rows = [row for row in read_rows(path) if all(row[column] == value for column, value in chart.rows.items())]
    origins = {(row["gpu"], row["commit"]) for row in rows}
    if len(origins) != 1:
        raise ValueError(f"{path} mixes runs, {sorted(origins)}: compare figures of one commit and GPU only")
    medians = {
        (row["config"], row["launch"], row["contender"], row["metric"]): float(row["median"])
        for row in rows
        if row["metric"] in chart.panels
    }
    return medians, rows[0]


def draw_panel(axis, chart: Chart, medians: dict[tuple[str, str, str, str], float], metric: str) -> None:
    """Draw one group of bars a model, one bar a contender; what was not measured has none."""
    title, label, factor = chart.panels[metric]
    measured = [name for name in CONTENDERS if any(contender == name for _, _, contender, _ in medians)]
    groups = [config for config in chart.configs if any((*config, name, metric) in medians for name in measured)]
    width = GROUP_WIDTH / len(measured)
    for i, contender in enumerate(measured):
        name, colour = CONTENDERS[contender]
        heights = [factor * medians.get((*config, contender, metric), math.nan) for config in groups]
        positions = [group + (i - (len(measured) - 1) / 2) * width for group in range(len(groups))]
        bars = axis.bar(positions, heights, width * 0.92, color=colour, label=name)
        labels = ["" if math.isnan(height) else label.format(height) for height in heights]
        axis.bar_label(bars, labels, fontsize=7, padding=1)
    axis.set_xticks(range(len(groups)), [chart.configs[config] for config in groups], fontsize=8)
    axis.set_title(title, fontsize=11, loc="left")
    axis.tick_params(axis="x", length=0)
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)


def draw_small_batches(results: Path, path: Path) -> None:
    """Draw milliseconds a step over tokens a step: a panel a model and mode, a colour a contender, a line style an
    execution; below each in grey what the GPU computes of ours as CUDA graphs."""
    rows = [row for row in read_rows(results) if row["metric"] in BUSY]
    panels, lines = {}, {}
    for row in rows:
        layers, tokens = map(int, row["shape"].split(","))
        panel = panels.setdefault((row["config"], layers, row["mode"]), {})
        is_ours = row["contender"] == "sonicmoe-hf" and row["launch"] == "reduce-overhead"
        if row["metric"] == "ms" or is_ours:
            line = panel.setdefault((row["contender"], row["launch"], row["metric"]), {})
            line[tokens] = float(row["median"])
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.3 * len(panels), 3.9), squeeze=False)
    for axis, ((config, layers, mode), panel) in zip(axes[0], panels.items()):
        for (contender, execution, metric), points in panel.items():
            name, colour = CONTENDERS[contender]
            label = f"{name}, {execution}" if metric == "ms" else "the GPU's part of it"
            style = {"color": colour if metric == "ms" else "#444444", "linestyle": EXECUTIONS[execution]}
            [lines[label]] = axis.plot(*zip(*sorted(points.items())), marker="o", markersize=3, label=label, **style)
        axis.loglog()
        counts = sorted({tokens for points in panel.values() for tokens in points})
        axis.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8, minor=False)
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(ticker.StrMethodFormatter("{x:.0f}"))
        axis.tick_params(axis="y", which="both", labelsize=8)
        axis.set_title(f"{config}, {layers} layers, {mode}", fontsize=11, loc="left")
        axis.set_xlabel("tokens a step", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("milliseconds a step", fontsize=8)
    figure.legend(lines.values(), lines.keys(), loc="upper center", ncols=3, frameon=False, fontsize=7, handlelength=4)
    origins = sorted({(row["gpu"], row["commit"]) for row in rows})
    conditions = "; ".join(f"{gpu}, commit {commit}" for gpu, commit in origins)
    figure.text(0.5, 0.01, f"Whole steps, random weights, balanced rows; {conditions}", ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 0.8))
    save(figure, path)


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def draw(chart: Chart, results: Path, path: Path) -> None:
    """Draw both panels, with the legend above and the origin below."""
    medians, origin = read_medians(results, chart)
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 3.9))
    for axis, metric in zip(axes, chart.panels):
        draw_panel(axis, chart, medians, metric)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    conditions = chart.conditions.format(gpu=origin["gpu"], commit=origin["commit"])
    figure.text(0.5, 0.01, conditions, ha="center", fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.04, 1, 0.92))
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    for chart in (LAYER, STEP):
        if (results := options.results / f"{chart.name}.csv").exists():
            draw(chart, results, options.out / f"{chart.name}.png")
    if (results := options.results / "small_batches.csv").exists():
        draw_small_batches(results, options.out / "small_batches.png")


if __name__ == "__main__":
    main()
