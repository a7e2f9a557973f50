"""What record_routing and replay_routing add to a training step of Qwen3-30B-A3B: GPU and wall time, all in one process.

    python -m benchmarks.step.replay_step
    python -m benchmarks.step.replay_step --device cpu --tiny --tokens 64 --rounds 2 --steps 1     # checks the script

Steps as in train_step.py: all weights in bf16, Liger, rows per expert as in a balanced model. The cases take turns, some
steps each in every round, and every round compares them with its own plain steps:

    plain             top-k
    recording         the step inside record_routing
    replaying         the step inside replay_routing, with what was recorded of the model before the first round
    a host's tensor   the same from an int64 tensor [layers, tokens, K] in the host's memory, as a server's answer is

The CSV has milliseconds a step (GPU: between events around a step, the median of a round; wall: by the host's clock
around a round's steps, which it waits for), and their ratio to plain's of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import torch

import sonicmoe_hf
from benchmarks.common import provenance
from benchmarks.common.paths import RESULTS
from benchmarks.step import models
from benchmarks.step.training import WARMUP, Clock, one_step, optimizer_of, sequences
from sonicmoe_hf.patching.support import find_layers

FIELDS = ("shape", "case", "metric", "median", "min", "max", "rounds", "gpu", "commit", "versions", "date")
MODEL = "Qwen3-30B-A3B"
RESULT = RESULTS / "replay_step.csv"


def build(options):
    """The patched model, as `train_step.py --liger --spread-load` trains it."""
    model = models.build(MODEL, options.layers, device=options.device, tiny=options.tiny)
    if options.tiny:
        for layer in model.model.layers:
            layer.mlp.gate.top_k = 2  # the tiny models' tokens take all experts, which leaves no other choice
    else:
        models.apply_liger(MODEL, model)
    models.spread_load(model)
    sonicmoe_hf.patch_model(model)
    return model.requires_grad_(True)


def record_of(model, tokens: torch.Tensor, **options):
    """The routing of one call without gradients, and its last logits."""
    with torch.no_grad(), sonicmoe_hf.record_routing(model) as routing:
        logits = model(input_ids=tokens, logits_to_keep=8, **options).logits
    return routing, logits


def check(model, tokens: torch.Tensor) -> None:
    """The same model gives the same bits, and a changed one uses the recorded experts.

    Raises:
        SystemExit: it does not.
    """
    routing, logits = record_of(model, tokens)
    given = routing.tensors()[0].long().cpu()
    for source in (routing, given):
        with torch.no_grad(), sonicmoe_hf.replay_routing(model, source):
            again = model(input_ids=tokens, logits_to_keep=8).logits
        if not torch.equal(again, logits):
            raise SystemExit("replay: the same model does not give the same bits")
    other = given.roll(1, dims=1)  # each token with its neighbour's experts
    with torch.no_grad(), sonicmoe_hf.replay_routing(model, other), sonicmoe_hf.record_routing(model) as used:
        changed = model(input_ids=tokens, logits_to_keep=8).logits
    if not torch.equal(used.tensors()[0].cpu().long(), other) or torch.equal(changed, logits):
        raise SystemExit("replay: another choice of experts was not used")
    print("replay: the same bits from the same model, and all experts as given", flush=True)


def timed(model, optimizer, tokens: torch.Tensor, context, steps: int) -> tuple[float, float]:
    """Median GPU milliseconds of a step, and the mean by the host's clock, of steps inside `context()`."""
    wait = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    wait()
    watch, began = Clock(tokens.is_cuda), time.perf_counter()
    watch.note()
    for _ in range(steps):
        with context():
            one_step(model, optimizer, tokens, autocast=False)
        watch.note()
    wait()
    wall = 1e3 * (time.perf_counter() - began) / steps
    return statistics.median(watch.milliseconds()), wall


def measure(model, tokens: torch.Tensor, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """case -> (GPU, wall) milliseconds of each round. Every round begins with another case."""
    optimizer = optimizer_of(model)
    routing, _ = record_of(model, tokens)
    given = routing.tensors()[0].long().cpu()
    cases = {
        "plain": contextlib.nullcontext,
        "recording": lambda: sonicmoe_hf.record_routing(model),
        "replaying": lambda: sonicmoe_hf.replay_routing(model, routing),
        "a host's tensor": lambda: sonicmoe_hf.replay_routing(model, given),
    }
    for context in cases.values():
        timed(model, optimizer, tokens, context, WARMUP)
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    order = list(cases)
    for _ in range(rounds):
        for case in order:
            found[case].append(timed(model, optimizer, tokens, cases[case], steps))
        order = order[1:] + order[:1]
    return found


def rows_of(found: dict[str, list[tuple[float, float]]], shape: str) -> list[dict]:
    """The CSV's rows."""
    origin = {"gpu": provenance.gpu(), **provenance.columns()}
    rows = []
    for case, rounds in found.items():
        for place, clock in enumerate(("GPU", "wall")):
            values = [figures[place] for figures in rounds]
            plain = [figures[place] for figures in found["plain"]]
            ratios = [value / base for value, base in zip(values, plain)]
            for metric, listed in ((f"{clock} ms", values), (f"{clock}, over plain", ratios)):
                figures = [f"{value:.6g}" for value in (statistics.median(listed), min(listed), max(listed))]
                columns = (shape, case, metric, *figures, len(listed))
                rows.append(dict(zip(FIELDS, columns)) | origin)
    return rows


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="of each case in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to check the script")
    parser.add_argument("--csv", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    model = build(options)
    tokens = sequences(options.tokens, model.config.vocab_size, options.device)
    check(model, tokens)
    found = measure(model, tokens, options.rounds, options.steps)
    layers = len(list(find_layers(model)))
    rows = rows_of(found, f"{layers} layers, {options.tokens} tokens")
    provenance.write_rows(options.csv, FIELDS, rows)
    table = {(row["case"], row["metric"]): row for row in rows}
    print("| case | GPU ms | over plain | wall ms | over plain |\n|---|---|---|---|---|")
    for case in found:
        cells = []
        for clock in ("GPU", "wall"):
            row, ratio = table[case, f"{clock} ms"], table[case, f"{clock}, over plain"]
            cells.append(f"{float(row['median']):.2f} ({float(row['min']):.2f} to {float(row['max']):.2f})")
            cells.append(
                ""
                if case == "plain"
                else " to ".join(f"{float(ratio[k]) - 1:+.2%}" for k in ("min", "max"))
                + f", median {float(ratio['median']) - 1:+.2%}"
            )
        print(f"| {case} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
