"""The bar and the line that long commands draw on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Move = Callable[[int, int], None]


@contextmanager
def progress(description: str, of_bytes: bool = False) -> Iterator[Move]:
    """Draw a bar with the time that is left, while the block runs; gives the function (done, in all) that moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    amounts = (DownloadColumn(), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}"), BarColumn(), *amounts, TimeElapsedColumn(), TimeRemainingColumn()
    # on one terminal what is printed comes above the bar; where it goes elsewhere, it must go on doing so
    redirected = sys.stdout.isatty()
    with Progress(*columns, console=console, disable=not console.is_terminal, redirect_stdout=redirected) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def line(sentence: str, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Draw a line that says what is done, while the block runs; gives the function that changes it."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield lambda sentence: None
        return
    with console.status(escape(sentence)) as status:
        yield lambda sentence: status.update(escape(sentence))
