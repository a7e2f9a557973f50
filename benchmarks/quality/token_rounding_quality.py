"""Does token rounding cost quality? Small MoE language models trained from scratch, by routing method.

    python -m benchmarks.quality.token_rounding_quality --preset gpu --seeds 0 1 2 3     # 27 M parameters, on a GPU
    python -m benchmarks.quality.token_rounding_quality --preset cpu --seeds 0 --methods top_k nearest    # 3.7 M

For each seed all methods share initial weights and batches (training.py), and all are evaluated with top-k:

    top_k                                                    the model's own routing
    nearest balanced stochastic nearest_score up down        token rounding; down drops to the tile boundary
    token_drop      a capacity factor of 1.25: what an expert gets beyond 1.25 T*K/E rows is dropped
    expert_choice   every expert takes its T*K/E best tokens of the batch: the cautionary row

The tile varies at a fixed batch, so that 8, 4, 2 and 1 tiles per expert have the same data, the same steps and the same
top-k run to be compared with. The most decisive runs come first (GROUPS). Some methods run twice from a start that
differs by 1e-4 of every weight: the two show how far apart equal methods end.

Every finished run becomes a row of the CSV at once, and runs whose row is there are skipped: call it again to continue.
Columns beside the obvious: train_loss_25, _50, _75, _100: mean cross-entropy of the steps before that percentage of
training; bits_per_byte, of the held-out text; rows_ratio, rows routed in the last 20 steps over top-k's; starved_share,
how often an expert got no row in one of those steps; dead_share, experts without a row in all of them;
dead_share_held_out, experts that top-k never chooses on the held-out files; load_cv_held_out, standard deviation of rows
per expert there over the mean; training_seconds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from benchmarks.quality.comparison import SWEPT, compare, compare_tiles
from benchmarks.quality.runs import do_missing, parser_of
from benchmarks.quality.training import METHODS, PRESETS, Preset, TrainingRun, measure
from sonicmoe_hf.layer.config import ROUNDINGS

BALANCING = ("layer", "none")
TILES_PER_EXPERT = (8, 4, 2, 1)
# groups of (method, tiles per expert, balancing loss, replica): a group is done for all seeds before the next begins
GROUPS = (
    (
        ("top_k", 0, "layer", 0),
        ("nearest", 4, "layer", 0),
        ("balanced", 4, "layer", 0),
        ("nearest", 2, "layer", 0),
        ("balanced", 2, "layer", 0),
    ),
    (
        ("expert_choice", 0, "layer", 0),
        ("nearest", 1, "layer", 0),
        ("balanced", 1, "layer", 0),
        ("top_k", 0, "none", 0),
        ("nearest", 4, "none", 0),
        ("balanced", 4, "none", 0),
        ("nearest", 8, "layer", 0),
        ("balanced", 8, "layer", 0),
        ("nearest", 2, "none", 0),
        ("balanced", 2, "none", 0),
        ("top_k", 0, "layer", 1),
        ("expert_choice", 0, "none", 0),
        ("token_drop", 0, "layer", 0),
        ("nearest", 1, "none", 0),
        ("balanced", 1, "none", 0),
    ),
    (
        ("stochastic", 4, "layer", 0),
        ("nearest_score", 4, "layer", 0),
        ("up", 4, "layer", 0),
        ("down", 4, "layer", 0),
    ),
)
SETTINGS = ("steps", "learning_rate", "final_rate")
KEYS = ("preset", *TrainingRun._fields, *SETTINGS)


def list_runs(preset: Preset, methods, seeds: list[int]) -> list[TrainingRun]:
    """List every run of these methods, in GROUPS's order."""
    return [
        TrainingRun(method, preset.mean_rows // tiles if tiles else 0, balancing, seed, replica)
        for group in GROUPS
        for seed in seeds
        for method, tiles, balancing, replica in group
        if method in methods
    ]


def columns_of(preset: Preset, run: TrainingRun) -> dict:
    """List KEYS' columns, which tell runs apart, and the tiles of an expert with the mean number of rows."""
    keys = preset.name, *run, preset.steps, preset.learning_rate, preset.final_rate
    return {**dict(zip(KEYS, keys)), "tiles_per_expert": preset.mean_rows / run.tile if run.tile else ""}


def by_method(rows: list[dict], balancing: str) -> dict[tuple[str, int], list[dict]]:
    """Sort rows as (method, tile) -> its rows under this balancing loss: in METHODS' order, the smallest tile first."""
    table: dict[tuple[str, int], list[dict]] = {}
    for row in sorted(rows, key=lambda row: (METHODS.index(row["method"]), int(row["tile"]))):
        if row["balancing"] == balancing:
            table.setdefault((row["method"], int(row["tile"])), []).append(row)
    return table


def show(rows: list[dict], balancing: str) -> None:
    """Print the held-out loss over top-k's under one balancing loss, with its standard error, and what can be
    resolved."""
    table = by_method(rows, balancing)
    comparison = compare(table)
    print(f"balancing loss: {balancing}; held-out loss minus top-k's, nats per token, ± a standard error")
    over = comparison.over_top_k
    tiles = compare_tiles(table).over_top_k
    for (method, tile), (value, error) in (over | {name: tiles[name] for name in tiles if name not in over}).items():
        print(f"{method}, tile {tile}: {value:+.4f} ± {error:.4f}, {len(table.get((method, tile), ()))} runs")
    print(f"standard deviation of a run: {comparison.run_sd:.4f}, {comparison.freedom} degrees of freedom")


def plot_tiles(axis, table: dict[tuple[str, int], list[dict]]) -> None:
    """Plot the held-out loss over top-k's by tiles per expert, a line a rounding; methods without a tile as lines
    across."""
    over = compare(table).over_top_k
    for colour, method in enumerate(SWEPT):
        swept = [name for name in over if name[0] == method]
        x = [float(table[name][0]["tiles_per_expert"]) * (0.97 + 0.06 * colour) for name in swept]
        y, error = [over[name][0] for name in swept], [2 * over[name][1] for name in swept]
        axis.errorbar(x, y, error, fmt="o-", capsize=3, color=f"C{colour}", label=f"{method}, ± 2 standard errors")
    for colour, name in enumerate((name for name in over if name[0] not in ROUNDINGS), len(SWEPT)):
        value, error = over[name]
        axis.axhline(value, color=f"C{colour}", linestyle="--", label=f"{name[0]}: {value:+.3f} ± {2 * error:.3f}")
    axis.axhline(0.0, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlim(0.8, 10)
    axis.set_xticks(TILES_PER_EXPERT, TILES_PER_EXPERT)
    axis.set_xlabel("mean rows per expert / tile")
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)


def plot(rows: list[dict], path: Path) -> None:
    """Plot the held-out loss over top-k's, by tile and balancing loss."""
    from matplotlib.figure import Figure

    tables = {balancing: table for balancing in BALANCING if (table := by_method(rows, balancing))}
    figure = Figure(figsize=(5.2 * len(tables), 4), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    for axis, (balancing, table) in zip(axes, tables.items()):
        plot_tiles(axis, table)
        axis.set_title("balancing loss of every layer" if balancing == "layer" else "no balancing loss", fontsize=10)
    axes[0].set_ylabel("held-out loss minus top-k's, nats per token")
    figure.savefig(path, dpi=140)


def main(arguments: list[str] | None = None) -> None:
    """Do the runs that are missing, print the table, draw the plot."""
    parser = parser_of(__doc__, "token_rounding_quality.csv", seeds=[0, 1, 2])
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--learning-rate", type=float, help="at its peak, in place of the preset's")
    parser.add_argument("--final-rate", type=float, help="share of it at the end, in place of the preset's")
    options = parser.parse_args(arguments)
    chosen = {name: getattr(options, name) for name in SETTINGS}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    preset = dataclasses.replace(PRESETS[options.preset], **chosen)
    runs = list_runs(preset, options.methods, options.seeds)
    rows = do_missing(runs, preset, options, KEYS, columns_of, measure)
    settings = ("preset", *SETTINGS)
    values = [str(value) for value in (preset.name, preset.steps, preset.learning_rate, preset.final_rate)]
    rows = [row for row in rows if [row[name] for name in settings] == values]
    for balancing in BALANCING:
        if by_method(rows, balancing):
            show(rows, balancing)
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: matplotlib is not installed")
    elif rows:
        plot(rows, options.csv.with_name(f"{options.csv.stem}_{preset.name}.png"))


if __name__ == "__main__":
    main()
