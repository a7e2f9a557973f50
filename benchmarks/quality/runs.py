"""The runs of token_rounding_quality.py and load_balance.py: their options, and a CSV that grows by a row a run."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.common import provenance
from benchmarks.common.paths import RESULTS
from benchmarks.quality import quality_corpus
from benchmarks.quality.training import PRESETS, Preset, Steps, at_once

Run = TypeVar("Run")
Measure = Callable[[Preset, Run, quality_corpus.Corpus, torch.device, bool], Steps[dict]]


def parser_of(description: str, seeds: list[int]) -> argparse.ArgumentParser:
    """With the options that both scripts have; `seeds` by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", nargs="*", type=int, default=seeds, help="two processes: half of them each")
    parser.add_argument("--steps", type=int, help="optimiser steps, in place of the preset's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run that would end later")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, on streams of their own")
    parser.add_argument("--no-graph", action="store_true", help="train without CUDA graphs")
    parser.add_argument("--corpus", type=Path, default=quality_corpus.FILE)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def read_rows(path: Path) -> list[dict]:
    """The CSV's rows; none where it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, fields: tuple[str, ...], row: dict, device: torch.device) -> None:
    """Write one run's row, with where it comes from, so that a run cut off later loses nothing."""
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if new:
            writer.writeheader()
        writer.writerow({**row, "device": gpu, **provenance.columns()})


def do_missing(
    runs: list[Run],
    preset: Preset,
    options: argparse.Namespace,
    path: Path,
    fields: tuple[str, ...],
    columns_of: Callable[[Preset, Run], dict],
    measure: Measure,
) -> None:
    """Do the runs without a row in the CSV, and append one as each ends. `columns_of` tells runs apart; `measure` gives
    their figures."""
    began = time.monotonic()
    columns = {run: columns_of(preset, run) for run in runs}
    done = [{name: row[name] for name in columns[runs[0]]} for row in read_rows(path)] if runs else []
    missing = [run for run in runs if {name: str(value) for name, value in columns[run].items()} not in done]
    if not missing:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = quality_corpus.load(options.corpus)
    print(f"{len(missing)} runs to do; {corpus.description}; {len(corpus.train):,} tokens", flush=True)
    graph = options.device.type == "cuda" and not options.no_graph
    took = 0.0

    def in_time() -> Iterator[Run]:
        for run in missing:
            if time.monotonic() - began + took > options.seconds:
                return
            yield run

    def steps_of(run: Run) -> Steps[dict]:
        return measure(preset, run, corpus, options.device, graph)

    for number, (run, figures) in enumerate(at_once(options.at_once, in_time(), steps_of)):
        written = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in figures.items()}
        row = {**columns[run], "tokens_per_step": preset.tokens, **written, "corpus": corpus.description}
        append_row(path, fields, row, options.device)
        if number >= options.at_once:  # the first ones compile kernels
            took = figures["training_seconds"]
        said = ", ".join(f"{name} {value}" for name, value in written.items())
        print(f"{run}: {said}; ended at {time.monotonic() - began:.0f} s", flush=True)
