"""The `sonicmoe-hf` command: its parser, and what becomes of errors. Each command is a function in a file of its own."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys

from safetensors import SafetensorError

from sonicmoe_hf_command import top_level

from ... import __version__
from .check import check
from .checkpoints import convert, merge
from .demo import demo
from .doctor import doctor
from .example import example
from .plan import plan
from .run import run, split_program
from .warmup import warmup

COMMANDS = (doctor, demo, warmup, plan, convert, merge, check, run, example)


class _UsageError(Exception):
    """The error of a command line that cannot be read: its parser, and what is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise _UsageError(self, message)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line of `sonicmoe-hf`."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    parser, subparsers = top_level(_Parser, f"sonicmoe-hf {__version__} ({packages})")
    for command in COMMANDS:
        command.add_to(subparsers)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code. An error is one line on standard error, or with --json an object."""
    arguments, program = split_program(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    try:
        options = vars(build_parser().parse_args(arguments))
        if options.pop("command") == "run":
            options["program"] = program
        return options.pop("run")(**options)
    except _UsageError as error:
        parser, message = error.args
        if not as_json:
            argparse.ArgumentParser.error(parser, message)
        return _say(message, as_json, 2)
    # what this package, the system or safetensors says of an input, such as a folder that another user keeps closed
    except (ImportError, OSError, SafetensorError, ValueError) as error:
        return _say(" ".join(str(error).split()) or type(error).__name__, as_json, 2)
    except KeyboardInterrupt:
        return _say("interrupted", as_json, 130)


def _say(message: str, as_json: bool, code: int) -> int:
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    else:
        print(f"sonicmoe-hf: {message}", file=sys.stderr)
    return code
