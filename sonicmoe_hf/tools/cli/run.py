"""`sonicmoe-hf run`: a program of somebody else's, with its models patched."""

from __future__ import annotations

import sys

from ..autopatch.program import run_program
from ..autopatch.settings import RunSettings
from .commands import COMMANDS


def split_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the command line of `sonicmoe-hf run` from the program's, which follows the first "--" (launchers may have
    taken it out), or begins with the first word that is none of ours. Any other command line is whole."""
    if arguments[:1] != ["run"]:
        return arguments, []
    with_value = [names for names, settings in COMMANDS["run"].options if "action" not in settings]
    names, position = [name for names in with_value for name in names], 1
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return arguments[:position], arguments[position + 1 :]
        if word in ("-m", "-c") or not word.startswith("-"):
            _warn_of_misplaced(arguments[position:])
            return arguments[:position], arguments[position:]
        position += 2 if word in names else 1
    return arguments, []


def _warn_of_misplaced(program: list[str]) -> None:
    """Say which options of `sonicmoe-hf run` stand among the program's, without a "--" that tells them apart."""
    own = {name for names, _ in COMMANDS["run"].options for name in names}
    if misplaced := sorted({word.partition("=")[0] for word in program} & own):
        print(
            f"sonicmoe-hf: {', '.join(misplaced)} after {program[0]} is passed on to it; options of sonicmoe-hf run "
            "stand before the program's name",
            file=sys.stderr,
        )


def run(program: list[str], **settings) -> int:
    """Run `sonicmoe-hf run`."""
    if not program:
        raise ValueError("no program to run; name it after --: sonicmoe-hf run -- trl sft ...")
    return run_program(program, RunSettings(**settings))
