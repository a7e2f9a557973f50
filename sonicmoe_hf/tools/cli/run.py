"""`sonicmoe-hf run`: a program of somebody else's, with its models patched."""

from __future__ import annotations

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
            return arguments[:position], arguments[position:]
        position += 2 if word in names else 1
    return arguments, []


def run(program: list[str], **settings) -> int:
    """Run `sonicmoe-hf run`."""
    if not program:
        raise ValueError("no program to run; name it after --: sonicmoe-hf run -- trl sft ...")
    return run_program(program, RunSettings(**settings))
