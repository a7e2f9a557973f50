"""The runs of token_rounding_quality.py and load_balance.py: their options, and a CSV that grows by a row a run."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.common.command import Command
from benchmarks.common.table import Rows, read_rows
from benchmarks.quality import quality_corpus
from benchmarks.quality.training import PRESETS, Preset

Run = TypeVar("Run")
Measure = Callable[[Preset, Run, quality_corpus.Corpus, torch.device, bool], dict]


def parser_of(description: str | None, csv: str, seeds: list[int]) -> Command:
    """Make the parser with the options that both scripts have; `seeds` is the default of its option."""
    parser = Command(description, csv, needs_gpu=False)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--preset", choices=list(PRESETS), default="gpu" if on_gpu else "cpu")
    parser.add_argument("--seeds", nargs="*", type=int, default=seeds)
    parser.add_argument("--steps", type=int, help="optimiser steps, in place of the preset's")
    parser.add_argument("--no-graph", action="store_true", help="train without CUDA graphs")
    parser.add_argument("--corpus", type=Path, default=quality_corpus.FILE)
    return parser


def do_missing(
    runs: list[Run],
    preset: Preset,
    options: argparse.Namespace,
    columns: Sequence[str],
    columns_of: Callable[[Preset, Run], dict],
    measure: Measure,
) -> list[dict[str, str]]:
    """Do the runs without a row in the CSV, and write one as each ends; the file's rows. columns: those of `columns_of`
    that tell runs apart; `measure` gives their figures."""
    device, rows = torch.device(options.device), Rows(options.csv, columns, gpu=False)
    of_run = {run: {name: str(value) for name, value in columns_of(preset, run).items()} for run in runs}
    done = [[row[name] for name in columns] for row in read_rows(options.csv)]
    missing = [run for run, values in of_run.items() if [values[name] for name in columns] not in done]
    if missing:
        print(f"{len(missing)} runs to do", flush=True)
        corpus = quality_corpus.load(options.corpus)
    on = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    for run in missing:
        figures = measure(preset, run, corpus, device, device.type == "cuda" and not options.no_graph)
        about = {"tokens_per_step": preset.tokens, **figures, "corpus": corpus.description, "device": on}
        rows.add(**of_run[run], **about)
        rows.write()
    return read_rows(options.csv)
