"""The runs of token_rounding_quality.py compared: a fit of method and seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy

SWEPT = ("nearest", "balanced")


class Comparison(NamedTuple):
    """Differences between methods, in nats per token.

    over_top_k: (method, tile) -> (loss minus top-k's, its standard error). run_sd: standard deviation of a run around
    method + seed, with `freedom` degrees of freedom; NaN where there are none.
    """

    over_top_k: dict[tuple[str, int], tuple[float, float]]
    run_sd: float
    freedom: int


def compare(table: dict[tuple[str, int], list[dict]], column: str = "held_out_loss") -> Comparison:
    """Fit loss = method + seed by least squares; replicas are further runs of their method.

    One fit for all runs, so that a method lacking a seed is still compared like with like.
    """
    rows, names = [(name, row) for name, runs in table.items() for row in runs], list(table)
    seeds = list(dict.fromkeys(row["seed"] for _, row in rows))
    design = numpy.zeros((len(rows), len(names) + len(seeds)))
    for index, (name, row) in enumerate(rows):
        design[index, names.index(name)] = design[index, len(names) + seeds.index(row["seed"])] = 1.0
    loss = numpy.array([float(row[column]) for _, row in rows])
    inverse = numpy.linalg.pinv(design.T @ design)
    effect = inverse @ design.T @ loss
    freedom = int(len(rows) - numpy.linalg.matrix_rank(design))
    run_sd = float((((loss - design @ effect) ** 2).sum() / freedom) ** 0.5) if freedom else float("nan")
    over = {}
    for index, name in enumerate(names):
        if name != ("top_k", 0) and ("top_k", 0) in table:
            contrast = numpy.zeros(len(effect))
            contrast[index], contrast[names.index(("top_k", 0))] = 1.0, -1.0
            over[name] = float(contrast @ effect), run_sd * float(contrast @ inverse @ contrast) ** 0.5
    return Comparison(over, run_sd, freedom)


def compare_tiles(table: dict[tuple[str, int], list[dict]]) -> Comparison:
    """Compare as `compare` does, with nearest and balanced taken for one method: the tile's cost, from more runs."""
    merged: dict[tuple[str, int], list[dict]] = {}
    for (method, tile), runs in table.items():
        merged.setdefault((" or ".join(SWEPT) if method in SWEPT else method, tile), []).extend(runs)
    return compare(merged)
