"""The console of tables and sentences that a command prints."""

from __future__ import annotations

import os

from rich.console import Console

PIPED = 1000  # columns: no line of a file or of grep's ends at a screen's edge


def make_console(**options) -> Console:
    """Make a Console as wide as the terminal, or as its longest line where its output is piped and COLUMNS is not set."""
    console = Console(highlight=False, **options)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED
    return console
