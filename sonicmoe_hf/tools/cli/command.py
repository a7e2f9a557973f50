"""A command of `sonicmoe-hf`: a function of the options' names, whose docstring is what --help says."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from sonicmoe_hf_command import COMMANDS

Option = tuple[tuple[str, ...], dict[str, Any]]  # the arguments of argparse's add_argument


class Command(NamedTuple):
    """A subcommand. run: called with the options, and returns the exit code; settings: argparse's add_parser takes."""

    run: Callable[..., int]
    options: tuple[Option, ...]
    settings: dict[str, Any]

    def add_to(self, commands) -> None:
        """Declare it to argparse's subparsers."""
        name, description = self.run.__name__, inspect.getdoc(self.run)
        parser = commands.add_parser(name, description=description, help=COMMANDS[name], **self.settings)
        for names, settings in self.options:
            parser.add_argument(*names, **settings)
        parser.set_defaults(run=self.run)


def option(*names: str, **settings) -> Option:
    """Declare an option, or an argument without dashes."""
    return names, settings


def command(*options: Option, **settings) -> Callable[[Callable[..., int]], Command]:
    """Make a command of the function below. settings: what else argparse's add_parser takes, such as `usage`."""
    return lambda run: Command(run, options, settings)


def at_least(least: int) -> Callable[[str], int]:
    """Make the type of an option that is a whole number."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def json_option(what: str = " instead of tables") -> Option:
    """Declare --json."""
    return option("--json", dest="as_json", action="store_true", help=f'print JSON{what}; errors are {{"error": ...}}')
