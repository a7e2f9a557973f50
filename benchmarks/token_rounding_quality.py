"""Does token rounding cost quality? Small MoE language models trained from scratch, by routing method.

    python benchmarks/token_rounding_quality.py --preset gpu --workers 8     # about 100 M parameters, on a GPU
    python benchmarks/token_rounding_quality.py --preset cpu --methods top_k nearest    # 3.6 M, minutes a run

The text is the standard library of the running Python; files held out by a hash of their path are for validation. For
each seed all methods share initial weights and batches (quality_training.py), and all are evaluated with top-k:

    top_k                                                    the model's own routing
    nearest balanced stochastic nearest_score up down        token rounding; down drops to the tile boundary
    token_drop      a capacity factor of 1.25: what an expert gets beyond 1.25 T*K/E rows is dropped
    expert_choice   every expert takes its T*K/E best tokens of the batch: the cautionary row

--sweep adds nearest and balanced at 8, 4, 2 and 1 tiles per expert. It varies the tile at a fixed batch, so that every
point has the same data, the same steps and the same top-k run to be compared with. All these runs have a load-balancing
loss of every layer; --pooled adds top_k, nearest and balanced with Transformers' own, which pools the layers.

Every finished run becomes a row of token_rounding_quality.csv at once, and runs whose row is there are skipped: call it
again to continue. Columns beside the obvious: train_loss, mean cross-entropy of the last 40 steps; bits_per_byte, of
the held-out text; rows_ratio, rows routed in the last 20 steps over top-k's; starved_share, how often an expert got no
row in one of those steps; dead_share, experts without a row in all of them; dead_share_held_out, experts that top-k
never chooses on the held-out files; load_cv_held_out, standard deviation of rows per expert there over the mean.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import multiprocessing
import os
import platform
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import provenance
import torch
from quality_training import METHODS, PRESETS, Corpus, Preset, Run, measure, read_corpus

from sonicmoe_hf.config import ROUNDINGS

SWEPT = ("nearest", "balanced")
BALANCING = ("layer", "pooled")
TILES_PER_EXPERT = (8, 4, 2, 1)
KEYS = ("preset", *Run._fields, "steps")
FIELDS = (
    *KEYS,
    "tiles_per_expert",
    "tokens_per_step",
    "learning_rate",
    "parameters",
    "first_loss",
    "train_loss",
    "valid_loss",
    "valid_perplexity",
    "bits_per_byte",
    "rows_ratio",
    "starved_share",
    "dead_share",
    "dead_share_held_out",
    "load_cv_held_out",
    "seconds",
    "corpus",
    "device",
    "commit",
    "versions",
    "date",
)


def planned_runs(preset: Preset, methods, seeds: int, sweep: bool, pooled: bool) -> list[Run]:
    """Every run asked for, once: the table's, the sweep's, those with the pooled balancing loss."""
    kinds = [(method, preset.tile if method in ROUNDINGS else 0, "layer") for method in methods]
    groups = [kinds, [], []]
    if sweep:
        groups[1] = [(method, preset.mean_rows // tiles, "layer") for tiles in TILES_PER_EXPERT for method in SWEPT]
    if pooled:
        groups[2] = [("top_k", 0, "pooled"), *((method, preset.tile, "pooled") for method in SWEPT)]
    runs = [Run(*kind, seed) for group in groups for seed in range(seeds) for kind in group]
    return list(dict.fromkeys(runs))


def read_rows(path: Path) -> list[dict]:
    """The CSV's rows; none where it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def unfinished(runs: list[Run], preset: Preset, rows: list[dict]) -> list[Run]:
    """The runs that have no row yet, with these steps."""
    done = {tuple(row[key] for key in KEYS) for row in rows}
    return [run for run in runs if tuple(map(str, (preset.name, *run, preset.steps))) not in done]


def append_row(path: Path, preset: Preset, run: Run, figures: dict, description: str, device: torch.device) -> None:
    """Write one run's row, so that a run cut off later loses nothing."""
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    row = {
        **dict(zip(KEYS, (preset.name, *run, preset.steps))),
        "tiles_per_expert": preset.mean_rows / run.tile if run.tile else "",
        "tokens_per_step": preset.tokens,
        "learning_rate": preset.learning_rate,
        **{name: f"{value:.6g}" if isinstance(value, float) else value for name, value in figures.items()},
        "corpus": description,
        "device": gpu,
        **provenance.columns(),
    }
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(row)


_shared = ()  # what all runs of a process have in common: preset, corpus, device


def start_process(threads: int | None, *shared) -> None:
    """Note what the runs of this process have in common; `threads` of the CPU are its own (None: as PyTorch has it)."""
    global _shared
    if threads:
        torch.set_num_threads(threads)
    _shared = shared


def work(run: Run) -> dict:
    """One run's figures."""
    preset, corpus, device = _shared
    return measure(preset, run, corpus, device)


def results(runs: list[Run], preset: Preset, corpus: Corpus, device: torch.device, workers: int):
    """Do the runs, `workers` of them at a time: (run, figures) as each ends."""
    if workers == 1:
        start_process(None, preset, corpus, device)
        yield from ((run, work(run)) for run in runs)
        return
    # processes of their own also on one GPU, which a model of this size leaves idle most of the time
    context, threads = multiprocessing.get_context("spawn"), max((os.cpu_count() or 1) // workers, 1)
    with ProcessPoolExecutor(workers, context, start_process, (threads, preset, corpus, device)) as pool:
        running = {pool.submit(work, run): run for run in runs}
        for future in as_completed(running):
            yield running[future], future.result()


def by_method(rows: list[dict], balancing: str) -> dict[tuple[str, int], dict[int, dict]]:
    """(method, tile) -> seed -> row, in METHODS' order, of the runs with this balancing loss."""
    found = {}
    for row in sorted(rows, key=lambda row: (METHODS.index(row["method"]), int(row["tile"]), int(row["seed"]))):
        if row["balancing"] == balancing:
            found.setdefault((row["method"], int(row["tile"])), {})[int(row["seed"])] = row
    return found


def values(runs: dict[int, dict], name: str) -> list[float]:
    """A column of the CSV, by seed."""
    return [float(row[name]) for row in runs.values()]


def over_top_k(runs: dict[int, dict], top_k: dict[int, dict]) -> list[float]:
    """Held-out loss minus top-k's of the same seed, for the seeds that have both."""
    return [float(row["valid_loss"]) - float(top_k[seed]["valid_loss"]) for seed, row in runs.items() if seed in top_k]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def spread(numbers: list[float]) -> str:
    """Mean and, in brackets, the least and the largest."""
    return f"{mean(numbers):.4f} [{min(numbers):.4f}, {max(numbers):.4f}]" if numbers else ""


def noise(table: dict[tuple[str, int], dict[int, dict]]) -> float:
    """Standard deviation of held-out loss once the means of methods and of seeds are taken out: what is left to chance.

    Over the methods that have every seed; NaN with fewer than two of either.
    """
    seeds = sorted({seed for runs in table.values() for seed in runs})
    whole = [runs for runs in table.values() if len(runs) == len(seeds)]
    if len(seeds) < 2 or len(whole) < 2:
        return math.nan
    loss = torch.tensor([[float(runs[seed]["valid_loss"]) for seed in seeds] for runs in whole], dtype=torch.float64)
    rest = loss - loss.mean(0) - loss.mean(1, keepdim=True) + loss.mean()
    return (rest.square().sum() / ((len(seeds) - 1) * (len(whole) - 1))).sqrt().item()


def show(rows: list[dict], balancing: str) -> None:
    """The table, in Markdown: means over seeds, and for the losses the range."""
    table = by_method(rows, balancing)
    if not table:
        return
    print(f"balancing loss: {balancing}")
    print("| method | tile | seeds | held-out loss | loss over top-k's, same seed | perplexity | bits per byte "
          "| train loss | rows | starved | dead | dead, held-out | load cv, held-out |")  # fmt: skip
    print("|" + "---|" * 13)
    for (method, tile), runs in table.items():
        percent = (
            f"{mean(values(runs, name)):.1%}" for name in ("starved_share", "dead_share", "dead_share_held_out")
        )
        cells = (
            method,
            tile or "",
            len(runs),
            spread(values(runs, "valid_loss")),
            spread(over_top_k(runs, table.get(("top_k", 0), {}))),
            f"{mean(values(runs, 'valid_perplexity')):.3f}",
            f"{mean(values(runs, 'bits_per_byte')):.4f}",
            f"{mean(values(runs, 'train_loss')):.4f}",
            f"{mean(values(runs, 'rows_ratio')):.3f}",
            *percent,
            f"{mean(values(runs, 'load_cv_held_out')):.2f}",
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    print(f"standard deviation between runs, methods' and seeds' means taken out: {noise(table):.4f}")


def plot_methods(axis, table, preset: Preset, title: str) -> None:
    """Held-out loss by method: one dot a seed, a bar for the mean, a band for top-k's seeds."""
    if top_k := table.get(("top_k", 0)):
        losses = values(top_k, "valid_loss")
        axis.axhspan(min(losses), max(losses), color="grey", alpha=0.2, label="range of top-k's seeds")
    keys = [key for key in table if key[1] in (0, preset.tile)]
    for place, key in enumerate(keys):
        losses = values(table[key], "valid_loss")
        axis.plot([place] * len(losses), losses, "o", color="C0", markersize=4)
        axis.plot([place - 0.25, place + 0.25], [mean(losses)] * 2, color="C0")
    axis.set_xticks(range(len(keys)), [method for method, _ in keys], rotation=45, ha="right")
    axis.set_ylabel("held-out loss, nats per token (top-k evaluation)")
    axis.set_title(title, fontsize=10)


def plot_sweep(axis, table, preset: Preset) -> None:
    """Held-out loss over top-k's of the same seed, by tiles per expert: one dot a seed, a line through the means."""
    top_k = table.get(("top_k", 0), {})
    between_two_runs = 2**0.5 * noise(table)
    axis.axhspan(-between_two_runs, between_two_runs, color="grey", alpha=0.2, label="±1 sd of two runs' difference")
    for colour, method in enumerate(SWEPT, 1):
        points = [(preset.mean_rows / tile, over_top_k(runs, top_k)) for (name, tile), runs in table.items()
                  if name == method]  # fmt: skip
        points = [(tiles * (0.94 + 0.04 * colour), over) for tiles, over in points if over]  # side by side
        axis.plot([x for x, _ in points], [mean(over) for _, over in points], color=f"C{colour}", label=method)
        for x, over in points:
            axis.plot([x] * len(over), over, "o", color=f"C{colour}", markersize=4)
    axis.set_xscale("log", base=2)
    axis.set_xticks(TILES_PER_EXPERT, TILES_PER_EXPERT)
    axis.set_xlabel("mean rows per expert / tile")
    axis.set_ylabel("over top-k's of the same seed")
    axis.set_title("by tile", fontsize=10)


def plot(rows: list[dict], preset: Preset, path: Path) -> None:
    """Held-out loss by method, by tile and with the pooled balancing loss."""
    from matplotlib.figure import Figure

    table, pooled = (by_method(rows, balancing) for balancing in BALANCING)
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3 if pooled else 2)
    tiles = f"{preset.mean_rows / preset.tile:g} tiles of {preset.tile} rows per expert"
    plot_methods(axes[0], table, preset, f"by method ({tiles})")
    plot_sweep(axes[1], table, preset)
    if pooled:
        plot_methods(axes[2], pooled, preset, "balancing loss pooled over layers")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=140)


def main(arguments: list[str] | None = None) -> None:
    """Do the runs that are missing, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument(
        "--sweep", action="store_true", help="also nearest and balanced at 8, 4, 2, 1 tiles per expert"
    )
    parser.add_argument(
        "--pooled", action="store_true", help="also top_k, nearest, balanced, balanced over all layers"
    )
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--steps", type=int, help="optimiser steps, in place of the preset's")
    parser.add_argument("--corpus", type=Path, help="a folder of Python sources in place of the standard library")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    preset = PRESETS[options.preset]
    preset = dataclasses.replace(preset, steps=options.steps or preset.steps)
    path = options.out / "token_rounding_quality.csv"
    runs = planned_runs(preset, options.methods, options.seeds, options.sweep, options.pooled)
    if missing := unfinished(runs, preset, read_rows(path)):
        corpus = read_corpus(preset, options.corpus)
        print(
            f"{len(missing)} of {len(runs)} runs to do; {corpus.description}; {len(corpus.train):,} tokens", flush=True
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        for run, figures in results(missing, preset, corpus, options.device, options.workers):
            append_row(path, preset, run, figures, corpus.description, options.device)
            shown = "  ".join(f"{name} {figures[name]:.4f}" for name in ("valid_loss", "train_loss", "dead_share"))
            print(f"{run}  {shown}  {figures['seconds']:.0f} s", flush=True)
    rows = [row for row in read_rows(path) if row["preset"] == preset.name and row["steps"] == str(preset.steps)]
    for balancing in BALANCING:
        show(rows, balancing)
    plot(rows, preset, options.out / f"token_rounding_quality_{preset.name}.png")


if __name__ == "__main__":
    main()
