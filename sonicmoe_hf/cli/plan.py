"""`sonicmoe-hf plan`: which ways of training a model fit on which GPUs, before a byte of it is downloaded."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

from ..planning.memory import GIB, METHODS
from .example import FOLDER

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
EXAMPLE = re.compile(r"(?<!\S)examples/(?=\w+\.(?:py|yaml|json)(?!\S))")


def gibibytes(text: str) -> float:
    """ "80GB", "80GiB" or "80": GiB. Cards are named by GB and have as many GiB, within 1%."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*(?:GB|GiB|G)?", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of memory, such as 80GB")
    return float(match[1])


def add_plan(commands, at_least) -> None:
    """The subcommand, of whole numbers by `at_least(smallest)`."""
    plan = commands.add_parser(
        "plan",
        help="which ways of training a model fit on which GPUs, and the command of each",
        description="Reads a model's config.json alone (hub id or local folder) and prints which ways of training fit, "
        "GiB of a GPU by part at the peak, and the command of each, which runs this package's examples. Exit "
        "code: 0 if a way fits, 1 if none does, 2 if the model cannot be planned for.",
    )
    plan.add_argument("model", help="hub id or local folder")
    plan.add_argument("--gpus", type=at_least(1), default=1, help="of one machine (default %(default)s)")
    plan.add_argument("--gpu-memory", type=gibibytes, default=80.0, metavar="80GB", help="of each (default 80GB)")
    plan.add_argument("--tokens", type=at_least(1), default=4096, help="of a step on each GPU (default %(default)s)")
    plan.add_argument("--method", choices=METHODS, help="default: all")
    plan.add_argument(
        "--json", action="store_true", help='print JSON, with what does not fit; errors are {"error": ...}'
    )
    plan.set_defaults(run=run_plan)


def run_plan(arguments) -> int:
    """Prints the plan; the exit code."""
    from ..planning.sizes import sizes_of_checkpoint
    from ..planning.ways import ways_of

    sizes = sizes_of_checkpoint(arguments.model)
    ways = ways_of(
        sizes, gpus=arguments.gpus, gpu_memory=arguments.gpu_memory, tokens=arguments.tokens, method=arguments.method
    )
    if arguments.json:
        print(json.dumps(as_json(sizes, ways, arguments), indent=2))
    else:
        print_plan(sizes, ways, arguments)
    return 0 if any(way.fits for way in ways) else 1


def as_json(sizes, ways, arguments) -> dict:
    """Everything plan prints, and the ways that do not fit, as plain data."""
    return {
        "model": sizes.name,
        "parameters": sizes.total,
        "experts_parameters": sizes.experts,
        "gpus": arguments.gpus,
        "gpu_memory_GiB": arguments.gpu_memory,
        "tokens": ways[0].training.tokens,
        "notes": _notes(sizes),
        "ways": [
            {
                "name": way.name,
                "method": way.training.method,
                "fits": way.fits,
                "needed_GiB": round(way.needed, 2),
                "peak_GiB": round(way.memory.total / GIB, 2),
                "moment": way.memory.moment,
                "parts_GiB": {part: round(getattr(way.memory, part) / GIB, 2) for part in PARTS},
                "command": runnable(way.command),
            }
            for way in ways
        ],
    }


def _notes(sizes) -> list[str]:
    from ..planning.ways import left_out

    reason = left_out(sizes)
    return [*sizes.notes, *([reason] if reason is not None else [])]


def runnable(command: str) -> str:
    """A command that runs from here: with the examples of the checkout that this folder is, or of the package."""
    if (Path("examples") / "finetune.py").is_file():
        return command
    return EXAMPLE.sub(lambda match: shlex.quote(f"{FOLDER}/"), command)


def print_plan(sizes, ways, arguments) -> None:
    """The ways that fit as a table, their commands, and what does not fit."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..planning.ways import CONTEXT, GAPS, shown

    console = Console(soft_wrap=True, highlight=False)
    fitting, too_large = shown(ways)
    count = f"{arguments.gpus} GPU{'s' * (arguments.gpus > 1)} of {arguments.gpu_memory:g} GiB"
    console.print(
        f"{escape(sizes.name)}: {sizes.total / 1e9:.1f}e9 parameters, {sizes.experts / sizes.total:.0%} of them in "
        f"experts; {count}, {ways[0].training.tokens:,} tokens a step and GPU"
    )
    for note in _notes(sizes):
        console.print(f"[yellow]note: {escape(note)}[/]")
    if fitting:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
        table.add_column("", justify="right")
        table.add_column("what fits, GiB of a GPU at the peak")
        for heading in ("all", *PARTS.values()):
            table.add_column(heading, justify="right", no_wrap=True)
        for number, way in enumerate(fitting, 1):
            parts = (getattr(way.memory, part) / GIB for part in PARTS)
            table.add_row(
                str(number),
                escape(way.name),
                f"{way.memory.total / GIB:.1f}",
                *(f"{part:.1f}" if part >= 0.05 else "-" for part in parts),
            )
        console.print(table, soft_wrap=False)
        for number, way in enumerate(fitting, 1):
            console.print(f"[bold]{number}[/]  {escape(runnable(way.command))}")
        console.print()
    for way in too_large:
        console.print(
            f"does not fit: {escape(way.name)}: {way.needed:.0f} GiB (at the {way.memory.moment} "
            f"{way.memory.total / GIB:.0f})"
        )
    console.print(
        f"A way fits if its peak, {GAPS - 1:.0%} more for gaps between blocks, and {CONTEXT:g} GiB for CUDA's context do."
    )
