"""The rows of train_step.py as Markdown, a table a mode: what docs/performance.md shows."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

MEASURED = ("ms", "tokens_per_s", "peak_GiB", "first_step_s", "loss", "out_of_memory")


def read_rows(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of several CSV files; of those that measure the same, the last."""
    found = {}
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                key = tuple(row[name] for name in ("config", "shape", "contender", "mode", "launch", "metric"))
                found[key] = row
    return list(found.values())


def medians(rows: list[dict[str, str]]) -> dict[tuple, dict[str, float]]:
    """(mode, model, shape, settings, contender) -> metric -> median."""
    found: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if row["metric"] in MEASURED:
            key = row["mode"], row["config"], row["shape"], row["launch"], row["contender"]
            found.setdefault(key, {})[row["metric"]] = float(row["median"])
    return found


def _cells(figures: dict[str, float] | None) -> tuple[str, str]:
    """(speed, time and memory; first step and loss) of one run."""
    if figures is None:
        return "", ""
    if "out_of_memory" in figures:
        return "out of memory", ""
    return (
        f"{figures['tokens_per_s'] / 1e3:.1f}k, {figures['ms']:.1f} ms, {figures['peak_GiB']:.1f} GiB",
        f"{figures['first_step_s']:.0f} s, {figures['loss']:.3f}",
    )


def markdown(rows: list[dict[str, str]]) -> str:
    """For every mode two tables, a row a model and setting, a column a contender: tokens a second and GPU, milliseconds
    and peak; seconds of the first step and the last loss."""
    figures = medians(rows)
    text = []
    for mode in dict.fromkeys(key[0] for key in figures):
        own = {key[1:]: value for key, value in figures.items() if key[0] == mode}
        contenders = list(dict.fromkeys(key[-1] for key in own))
        cases = list(dict.fromkeys(key[:-1] for key in own))
        for number, title in enumerate(("tokens/s a GPU, ms, GiB", "first step, last loss")):
            text.append(f"\n{mode}: {title}\n")
            text.append("| model, layers, tokens | settings | " + " | ".join(contenders) + " |")
            text.append("|---" * (2 + len(contenders)) + "|")
            for model, shape, launch in cases:
                layers, tokens = shape.split(",")
                cells = [_cells(own.get((model, shape, launch, name)))[number] for name in contenders]
                text.append(f"| {model}, {layers}, {int(tokens):,} | {launch} | " + " | ".join(cells) + " |")
    return "\n".join(text)
