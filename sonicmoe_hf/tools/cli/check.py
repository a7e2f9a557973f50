"""`sonicmoe-hf check`: whether an adapter does what was trained, wherever it went."""

from __future__ import annotations

import json

from ..checking.check import Check, check_adapter
from ..checking.models import Loading
from ..checking.verdict import APPLIED


def check(base: str, adapter: str, folders: list[str], as_json: bool, server: str | None = None, **options) -> int:
    """Run `sonicmoe-hf check`."""
    from .bar import line

    loading = Loading(*(options.pop(name) for name in Loading._fields))
    with line("reading the text", not as_json) as say:
        result = check_adapter(base, adapter, folders, server=server, **options, loading=loading, say=say)
    if as_json:
        places = [
            {"place": place, **verdict._asdict(), "is_base": is_base} for place, verdict, is_base in result.places
        ]
        print(json.dumps({**result._asdict(), "places": places}, indent=2))
    else:
        print_check(result, asked_server=server is not None)
    wrong = [place for place in result.places if not place.is_right]
    if not wrong:
        return 0
    return 2 if all(place.is_unknown for place in wrong) else 1


def print_check(result: Check, asked_server: bool) -> None:
    """Print distances, shares and verdicts as a table, and the reasons below."""
    from rich import box
    from rich.table import Table

    from .console import make_console

    console = make_console(markup=False)
    parts = list(dict.fromkeys(part for place in result.places for part in place.verdict.shares))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for heading in ("to adapter", "to base", *parts):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    table.add_row("base", f"{result.change:.2g}", "0", *("0%" for _ in parts))
    table.add_row("adapter", "0", f"{result.change:.2g}", *("100%" for _ in parts))
    for place, verdict, _ in result.places:
        shares = ("?" if (share := verdict.shares.get(part)) is None else f"{share:.0%}" for part in parts)
        table.add_row(place, f"{verdict.from_adapter:.2g}", f"{verdict.from_base:.2g}", *shares, verdict.kind)
    console.print(
        f"mean difference of log p over {result.tokens:,} tokens; how much of the change is there", soft_wrap=True
    )
    console.print(table)
    for place, verdict, _ in result.places:
        if verdict.reason:
            console.print(f"{place}: {verdict.kind}: {verdict.reason}", soft_wrap=True)
    applied = [place.verdict for place in result.places if place.verdict.kind == APPLIED and not place.verdict.reason]
    of_applied = [share for verdict in applied for share in verdict.shares.values() if share is not None]
    if any(f"{share:.0%}" != "100%" for share in of_applied):
        noise = "what is applied differs from 100% by noise of rounding; --dtype float32 has less"
        console.print(noise, soft_wrap=True)
    if not asked_server:
        console.print("files were compared; --server URL asks a running server what it applies", soft_wrap=True)
