"""`sonicmoe-hf plan`: the ways of training a model that fit on GPUs, before a byte of it is downloaded."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..planning.choices import advise, choose_shown, choose_usual
from ..planning.memory import GIB
from ..planning.sizes import ModelSizes, sizes_of_checkpoint
from ..planning.ways import CONTEXT, GAPS, SEQUENCE, Way, ways_of, why_left_out
from .example import FOLDER

if TYPE_CHECKING:
    from rich.table import Table

PARTS = {  # fields of planning.memory.Memory, and their headings
    "experts": "experts",
    "rest": "rest",
    "gradients": "grads",
    "optimiser": "Adam",
    "adapters": "LoRA",
    "activations": "activ.",
    "logits": "logits",
    "communication": "comm.",
}
TRAINED_ON = (
    "They train on Python's standard library without --dataset (full_finetune_one_gpu.py: --text), and need the extra "
    '"all": pip install ".[all]".'
)
EXAMPLE = re.compile(r"(?<!\S)examples/(?=\w+\.(?:py|yaml|json)(?!\S))")


class Plan(NamedTuple):
    """The ways of training a model on so many GPUs of gpu_memory GiB, and notes on what the plan leaves out."""

    sizes: ModelSizes
    gpus: int
    gpu_memory: float
    ways: list[Way]
    notes: list[str]


def plan(
    model: str,
    gpus: int,
    gpu_memory: float,
    tokens: int | None,
    sequence_length: int,
    method: str | None,
    all: bool,
    as_json: bool,
) -> int:
    """Run `sonicmoe-hf plan`."""
    sizes = sizes_of_checkpoint(model)
    batch = {"tokens": tokens or max(SEQUENCE, sequence_length), "sequence": sequence_length}
    ways = ways_of(sizes, gpus=gpus, gpu_memory=gpu_memory, method=method, **batch)
    planned = Plan(sizes, gpus, gpu_memory, ways, [*sizes.notes, *filter(None, [why_left_out(sizes)])])
    if as_json:
        print(json.dumps(_plan_json(planned), indent=2))
    else:
        _print(planned, is_all=all)
    return 0 if any(way.fits for way in ways) else 1


def _plan_json(planned: Plan) -> dict[str, Any]:
    return {
        "model": planned.sizes.name,
        "parameters": planned.sizes.total,
        "experts_parameters": planned.sizes.experts,
        "gpus": planned.gpus,
        "gpu_memory_GiB": planned.gpu_memory,
        "tokens": planned.ways[0].training.tokens,
        "notes": planned.notes,
        "ways": [_way_json(way) for way in planned.ways],
    }


def _way_json(way: Way) -> dict[str, Any]:
    return {
        "name": way.name,
        "method": way.training.method,
        "fits": way.fits,
        "needed_GiB": round(way.needed, 2),
        "peak_GiB": round(way.memory.total / GIB, 2),
        "moment": way.memory.moment,
        "parts_GiB": {part: round(getattr(way.memory, part) / GIB, 2) for part in PARTS},
        "command": runnable(way.command),
        "expanded_memory_GiB": way.expanded_memory,  # what is left of it, for attach(trainer, expanded_memory=...)
    }


def runnable(command: str) -> str:
    """Make a command that runs from here: with the examples of the checkout that this folder is, or of the package."""
    if (Path("examples") / "finetune.py").is_file():
        return command
    return EXAMPLE.sub(lambda match: shlex.quote(f"{FOLDER}/"), command)


def _print(planned: Plan, is_all: bool) -> None:
    """Print the ways that fit as a table, their commands, and what does not fit. is_all: ways of all formats, and what
    they leave room for."""
    from rich.markup import escape

    from .console import make_console

    console, sizes = make_console(soft_wrap=True), planned.sizes
    ways = planned.ways if is_all else choose_usual(sizes, planned.ways)
    fitting, too_large = choose_shown(ways)
    console.print(
        f"{escape(sizes.name)}: {sizes.total / 1e9:.1f}e9 parameters, {sizes.experts / sizes.total:.0%} of them in "
        f"experts; {planned.gpus} GPU{'s' * (planned.gpus > 1)} of {planned.gpu_memory:g} GiB, "
        f"{ways[0].training.tokens:,} tokens a step and GPU"
    )
    for note in planned.notes:
        console.print(f"[yellow]note: {escape(note)}[/]")
    if fitting:
        console.print(_table_of(fitting), soft_wrap=False)
        for number, way in enumerate(fitting, 1):
            console.print(f"[bold]{number}[/]  {escape(runnable(way.command))}")
        console.print(f"{escape(TRAINED_ON)}\n\n{advise(fitting)}")
        room = (f"{number}: {way.expanded_memory}GiB" for number, way in enumerate(fitting, 1) if way.expanded_layers)
        if is_all and (listed := ", ".join(room)):
            console.print(
                f"Room for attach(trainer, expanded_memory=...), by which packed experts lie expanded: {listed}."
            )
    for way in too_large:
        console.print(
            f"does not fit: {escape(way.name)}: {way.needed:.0f} GiB (at the {way.memory.moment} "
            f"{way.memory.total / GIB:.0f})"
        )
    if len(ways) < len(planned.ways):
        console.print("Experts can be packed in other formats too: --all")
    console.print(
        f"A way fits if its peak, {GAPS - 1:.0%} more for gaps between blocks, and {CONTEXT:g} GiB for CUDA's context "
        "do. The way to begin with is first, the others stand by what trains, and by how near to bf16 experts are. A "
        "card has fewer GiB than its name says: 80GB counts as 79, 24GB as 23.5, and sonicmoe-hf doctor prints what is "
        "there, for --gpu-memory."
    )


def _table_of(ways: list[Way]) -> Table:
    """Make the table of ways and the parts of their memory."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("", justify="right")
    table.add_column("what fits, GiB of a GPU at the peak")
    for heading in ("all", *PARTS.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, way in enumerate(ways, 1):
        parts = (getattr(way.memory, part) / GIB for part in PARTS)
        cells = (f"{part:.1f}" if part >= 0.05 else "-" for part in parts)
        table.add_row(str(number), escape(way.name), f"{way.memory.total / GIB:.1f}", *cells)
    return table
