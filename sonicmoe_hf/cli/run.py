"""`sonicmoe-hf run`: a program of somebody else's, with its models patched."""

from __future__ import annotations

import argparse

from ..autopatch.program import ProgramError, run_program
from ..autopatch.settings import ROUTINGS, RunSettings
from ..kernels.quantized import FORMATS
from ..layer.config import SAVE_POLICIES

OPTIONS = ("--routing", "--tile", "--save", "--experts-quantization", "--adapt-experts")  # each takes a value
DESCRIPTION = """Runs a program with every Transformers model that it or its children build patched, and says at the
first training step what was patched, by which backend, or why not. PROGRAM is a command (trl, llamafactory-cli, axolotl,
swift, accelerate, torchrun), a Python file, or -m and a module; all that follows is its own. These take over the process,
so that arguments, exit code, signals, standard input and tracebacks are the program's. Under a launcher: torchrun ...
-m sonicmoe_hf run -- script.py."""


def split_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command line of `sonicmoe-hf run`, and the program's: what follows the first "--", which launchers may have
    taken out, or the first word that is none of ours. Any other command line is whole."""
    if arguments[:1] != ["run"]:
        return arguments, []
    position = 1
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if word in ("-m", "-c") or not word.startswith("-"):
            return arguments[:position], arguments[position:]
        position += 2 if word in OPTIONS else 1
    return arguments, []


def add_run(commands) -> None:
    """Add the command `run`."""
    run = commands.add_parser(
        "run",
        help="run a program (trl sft ..., script.py, -m module) with every model that it builds patched",
        description=DESCRIPTION,
        usage="sonicmoe-hf run [--routing ROUTING] [--tile ROWS] [--save SAVE] [--experts-quantization FORMAT] "
        "[--adapt-experts RANK] -- PROGRAM [ARGUMENT ...]",
    )
    run.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="top_k",
        metavar="ROUTING",
        help=f"in training: {', '.join(ROUTINGS)} (default %(default)s)",
    )
    run.add_argument("--tile", type=_positive, metavar="ROWS", help="of token rounding (default 128)")
    run.add_argument(
        "--save",
        choices=SAVE_POLICIES,
        default="preactivation",
        help="what layers keep for backward (default %(default)s)",
    )
    run.add_argument(
        "--experts-quantization", choices=FORMATS, help="hold experts that from_pretrained loads packed and frozen"
    )
    run.add_argument(
        "--adapt-experts",
        type=_positive,
        metavar="RANK",
        help="add the experts to the program's LoRA, which mostly adapts attention alone",
    )
    run.set_defaults(run=_run)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < len(text) < 10 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _run(arguments) -> int:
    if not arguments.program:
        raise ProgramError("no program to run; name it after --: sonicmoe-hf run -- trl sft ...")
    settings = RunSettings(
        routing=arguments.routing,
        tile=arguments.tile,
        save=arguments.save,
        experts_quantization=arguments.experts_quantization,
        adapt_experts=arguments.adapt_experts,
    )
    return run_program(arguments.program, settings)
