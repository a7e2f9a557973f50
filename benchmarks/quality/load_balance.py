"""Balancing methods compared: the load and the loss of the small model of token_rounding_quality.py with each.

    python -m benchmarks.quality.load_balance --preset gpu --seeds 0 1       # 27 M parameters, on a GPU
    python -m benchmarks.quality.load_balance --preset cpu --seeds 0         # 3.7 M

For each seed all runs of a router share initial weights and batches (training.py), and all are evaluated with
top-k, without any balancing loss:

    softmax   Qwen3-MoE's router: none; Transformers' pooled loss (router_aux_loss_coef); per_layer_loss
    sigmoid   DeepSeek-V3's router with its correction bias, in a model like Qwen3-MoE with one shared expert (dots1):
              none; bias_update, constant and linearly to zero; per_layer_loss

The most decisive runs come first (GROUPS). Every finished run becomes a row of the CSV at once, and runs whose row is
there are skipped.

Columns beside the obvious: load, the busiest expert's rows over the mean, in all of the last 20 training steps together
(10,240 rows an expert with --preset gpu), mean over the layers; load_worst, in its worst layer; load_step, in each of
these steps by itself, mean over steps and layers; load_held_out, load_held_out_worst, on the held-out files, by top-k.
dead, dead_held_out: experts without a row there, of all layers. rows_ratio: rows routed in those steps over top-k's.
"""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

import torch
from transformers import Dots1Config

import sonicmoe_hf
from benchmarks.quality import quality_corpus
from benchmarks.quality.counting import attach_counter
from benchmarks.quality.runs import do_missing, parser_of
from benchmarks.quality.training import (
    COUNTED_STEPS,
    PRESETS,
    Preset,
    evaluate,
    qwen3_config,
    random_model,
    sizes_of,
    train,
)
from sonicmoe_hf.layer.config import TokenRounding

TILES_PER_EXPERT = 4  # of nearest


class Case(NamedTuple):
    """A router, how it is balanced, at what rate (a coefficient or an update), and top_k or a rounding."""

    router: str
    balancing: str = "none"
    rate: float = 0.0
    routing: str = "top_k"


# a group is done for all seeds before the next begins
GROUPS = (
    (
        Case("softmax"),
        Case("softmax", "layer", 0.05),
        Case("softmax", "layer", 0.1),
        Case("sigmoid"),
        Case("sigmoid", "bias", 1e-3),
        Case("sigmoid", "bias_to_zero", 5e-3),
        Case("softmax", "pooled", 0.01),
        Case("softmax", "layer", 0.02),
        Case("softmax", "layer", 0.01),
    ),
    (
        Case("sigmoid", "bias", 5e-3),
        Case("softmax", "layer", 0.1, "nearest"),
        Case("softmax", "pooled", 0.001),
        Case("sigmoid", "bias_to_zero", 5e-3, "nearest"),
        Case("softmax", "layer", 0.2),
    ),
)
KEYS = ("preset", *Case._fields, "seed", "steps")
FIGURES = (
    "held_out_loss",
    "load",
    "load_worst",
    "load_step",
    "load_held_out",
    "load_held_out_worst",
    "dead",
    "dead_held_out",
    "rows_ratio",
    "training_seconds",
)
SeededCase = tuple[Case, int]


def sigmoid_config(preset: Preset) -> Dots1Config:
    """Make a config with the sizes of `qwen3_config`, with DeepSeek-V3's router and one shared expert."""
    return Dots1Config(**sizes_of(preset), n_routed_experts=preset.experts, n_shared_experts=1)


def build(preset: Preset, case: Case, seed: int, device: torch.device):
    """Build (model, counter of rows, what is to be called after every optimiser step or None), balanced by the
    case."""
    pooled = {"output_router_logits": True, "router_aux_loss_coef": case.rate} if case.balancing == "pooled" else {}
    config = sigmoid_config(preset) if case.router == "sigmoid" else qwen3_config(preset, **pooled)
    model = random_model(config, seed, device)
    policy = None
    if case.routing != "top_k":
        policy = TokenRounding(rounding=case.routing, tile=preset.mean_rows // TILES_PER_EXPERT)
    sonicmoe_hf.patch_model(model, routing=policy)
    after = None
    if case.balancing == "layer":
        sonicmoe_hf.LoadBalancing(per_layer_loss=case.rate).start(model)
    elif case.balancing.startswith("bias"):
        balancing = sonicmoe_hf.LoadBalancing(bias_update=case.rate)
        balancing.start(model)
        steps_left = torch.full((), float(preset.steps), device=device)

        def after():
            if case.balancing == "bias_to_zero":  # all on the device, for a CUDA graph
                steps_left.sub_(1.0)
                balancing.bias_update = case.rate * steps_left / preset.steps
            balancing.step(model)

    return model, attach_counter(model, preset.experts, device), after


def over_mean(rows: torch.Tensor) -> torch.Tensor:
    """Compute the busiest expert's rows over the mean, of each layer [layers]; rows [layers, E]."""
    rows = rows.double()
    return rows.amax(1) / rows.mean(1)


def measure(preset: Preset, run: SeededCase, corpus: quality_corpus.Corpus, device: torch.device, graph: bool):
    """Train and evaluate one run: FIGURES."""
    began = time.perf_counter()
    case, seed = run
    model, counter, after = build(preset, case, seed, device)
    train(model, counter, preset, corpus.train.to(device), seed, graph, after)
    seconds = time.perf_counter() - began
    rows, _, busiest = counter.read_counts()
    steps = min(COUNTED_STEPS, preset.steps)
    loss, held_out = evaluate(model, counter, preset, corpus.held_out.to(device))
    load, load_held_out = over_mean(rows), over_mean(held_out)
    figures = (
        loss,
        load.mean().item(),
        load.max().item(),
        (busiest / rows.double().mean(1)).mean().item(),
        load_held_out.mean().item(),
        load_held_out.max().item(),
        (rows == 0).sum().item(),
        (held_out == 0).sum().item(),
        rows.double().mean().item() / steps / preset.mean_rows,
        seconds,
    )
    return dict(zip(FIGURES, figures, strict=True))


def keys_of(preset: Preset, run: SeededCase) -> dict[str, str]:
    """Make KEYS' columns."""
    case, seed = run
    return dict(zip(KEYS, map(str, (preset.name, *case, seed, preset.steps))))


def main(arguments: list[str] | None = None) -> None:
    """Do the runs that are missing."""
    options = parser_of(__doc__, "load_balance.csv", seeds=[0, 1]).parse_args(arguments)
    preset = PRESETS[options.preset]
    preset = dataclasses.replace(preset, steps=options.steps or preset.steps)
    runs = [(case, seed) for group in GROUPS for seed in options.seeds for case in group]
    do_missing(runs, preset, options, KEYS, keys_of, measure)


if __name__ == "__main__":
    main()
