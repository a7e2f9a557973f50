"""`sonicmoe-hf run`: a program of somebody else's, with its models patched."""

from __future__ import annotations

from ...kernels.packed import FORMATS
from ...layer.config import SAVE_POLICIES
from ..autopatch.program import run_program
from ..autopatch.settings import ROUTINGS, RunSettings
from .command import at_least, command, option

OPTIONS = (  # each takes a value
    option(
        "--routing",
        choices=ROUTINGS,
        default="top_k",
        metavar="ROUTING",
        help=f"in training: {', '.join(ROUTINGS)} (default %(default)s)",
    ),
    option("--tile", type=at_least(1), metavar="ROWS", help="of token rounding (default 128)"),
    option(
        "--save",
        choices=SAVE_POLICIES,
        default="preactivation",
        help="what layers keep for backward (default %(default)s)",
    ),
    option(
        "--experts-quantization", choices=FORMATS, help="hold experts that from_pretrained loads packed and frozen"
    ),
    option(
        "--adapt-experts",
        type=at_least(1),
        metavar="RANK",
        help="add the experts to the program's LoRA, which mostly adapts attention alone",
    ),
)


def split_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line of `sonicmoe-hf run` from the program's, which follows the first "--" (launchers may have
    taken it out), or begins with the first word that is none of ours. Any other command line is whole."""
    if arguments[:1] != ["run"]:
        return arguments, []
    names, position = [name for names, _ in OPTIONS for name in names], 1
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if word in ("-m", "-c") or not word.startswith("-"):
            return arguments[:position], arguments[position:]
        position += 2 if word in names else 1
    return arguments, []


@command(
    *OPTIONS,
    usage="sonicmoe-hf run [--routing ROUTING] [--tile ROWS] [--save SAVE] [--experts-quantization FORMAT] "
    "[--adapt-experts RANK] -- PROGRAM [ARGUMENT ...]",
)
def run(program: list[str], **settings) -> int:
    """Run a program with every Transformers model that it or its children build patched, and say at the first training
    step what was patched, by which backend, or why not. PROGRAM is a command (trl, llamafactory-cli, axolotl, swift,
    accelerate, torchrun), a Python file, or -m and a module; all that follows is its own. These take over the process, so
    that arguments, exit code, signals, standard input and tracebacks are the program's. Under a launcher: torchrun ... -m
    sonicmoe_hf run -- script.py.
    """
    if not program:
        raise ValueError("no program to run; name it after --: sonicmoe-hf run -- trl sft ...")
    return run_program(program, RunSettings(**settings))
