"""The `sonicmoe-hf` command: its parser, and what becomes of errors. commands.py lists the commands."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import json
import sys
import traceback

from safetensors import SafetensorError

from .commands import COMMANDS
from .run import split_program


class _UsageError(Exception):
    """The error of a command line that cannot be read: its parser, and what is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise _UsageError(self, message)


class _CommandParser(_Parser):
    """The parser of one command, whose usage stands beside what it does not know."""

    def parse_known_args(self, args=None, namespace=None):
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for names, _ in COMMANDS[self.prog.split()[-1]].options for name in names if name[0] == "-"]
            names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            meant = [close for name in names for close in difflib.get_close_matches(name, known, 1)]
            hint = f"did you mean {', '.join(meant)}? " if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {hint}{self.prog} --help lists the options")
        return options, unknown


class _PrintVersions(argparse.Action):
    def __call__(self, parser, *_):
        own, *others = (
            f"{name} {importlib.metadata.version(name)}" for name in ("sonicmoe-hf", "torch", "transformers")
        )
        print(f"{own} ({', '.join(others)})")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Build the command line of `sonicmoe-hf`."""
    parser = _Parser(prog="sonicmoe-hf", description="SonicMoE for Hugging Face Transformers")
    parser.add_argument(
        "--version", action=_PrintVersions, nargs=0, default=argparse.SUPPRESS, help="print versions and exit"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.line, description=command.description, usage=command.usage, allow_abbrev=False
        )
        for names, option in command.options:
            subparser.add_argument(*names, **option)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code. An error is one line on standard error, or with --json an object."""
    arguments, program = split_program(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    try:
        options = vars(build_parser().parse_args(arguments))
        name = options.pop("command")
        if name == "run":
            options["program"] = program
        package = sys.modules[__name__.partition(".")[0]]
        if COMMANDS[name].imports_torch and not hasattr(package, "__version__"):
            importlib.reload(package)  # whose __init__.py sonicmoe_hf_command.py has left to us
        return getattr(importlib.import_module(f".{COMMANDS[name].module}", __package__), name)(**options)
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
    except Exception as error:  # a defect of ours, which must not end in 1: that means "not supported", "not applied"
        traceback.print_exc()
        return _say(f"a defect of sonicmoe-hf, please report it: {type(error).__name__}: {error}", as_json, 2)


def _say(message: str, as_json: bool, code: int) -> int:
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    else:
        print(f"sonicmoe-hf: {message}", file=sys.stderr)
    return code
