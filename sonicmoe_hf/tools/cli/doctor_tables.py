"""The doctor's facts as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...layer import backends
from .console import make_console

YES_OR_NO = {True: "[green]yes[/]", False: "[red]no[/]"}


def print_doctor(facts: dict[str, Any]) -> None:
    """Print versions, devices and, where a model was examined, its layers."""
    console = make_console()
    table = Table(title="Versions", title_justify="left", show_header=False)
    for package, version in facts["versions"].items():
        table.add_row(package, version, style="dim" if version == "not installed" else None)
    console.print(table)
    for sentence in facts["untested_versions"]:
        console.print(f"[yellow]{escape(sentence)}[/]")
    console.print(_devices_table(facts["devices"]))
    override = facts["backend_override"]
    console.print(f"{backends.BACKEND_VARIABLE} is {'not set' if override is None else repr(override)}\n")
    if "model" in facts:
        _print_model(console, facts["model"])


def _devices_table(devices: list[dict[str, Any]]) -> Table:
    """Make a table with a row per device and backend, which dtypes share that get the same."""
    table = Table("device", "dtypes", "backend", "why", title="Devices", title_justify="left")
    for device in devices:
        shared: dict[tuple[str, str], list[str]] = {}
        for dtype, choice in device["backends"].items():
            shared.setdefault(choice, []).append(dtype)
        name = f"{device['name']} ({escape(device['description'])})"
        for (backend, reason), dtypes in shared.items():
            table.add_row(name, ", ".join(dtypes), backend, escape(reason))
    return table


def _print_model(console: Console, model: dict[str, Any]) -> None:
    name, here = f"{escape(model['name'])} ({model['architecture']})", model["here"]
    if not model["layers"]:
        console.print(
            f"[red]{name} has no mixture-of-experts layer that goes through Transformers' experts interface: there is "
            "nothing to accelerate.[/]"
        )
        return
    table = Table(title=name, title_justify="left")
    for heading in ("layers", "family", "supported", "backend", "token rounding"):
        table.add_column(heading, no_wrap=True)
    for layers in model["layers"]:
        backend = here["backend"] if layers["supported"] else "-"
        supported, token_rounding = (YES_OR_NO[layers[key]] for key in ("supported", "token_rounding"))
        table.add_row(escape(layers["layers"]), layers["family"] or "-", supported, backend, token_rounding)
    console.print(table)
    console.print(f"backend here: {here['backend']} ({here['device']}, {here['dtype']}): {escape(here['reason'])}")
    for layers in model["layers"]:  # below the table: reasons are sentences, and a terminal may be narrow
        for sentence in filter(None, (layers["reason"], layers["kernels"])):
            console.print(f"{escape(layers['layers'])}: {escape(sentence)}")
    for sentence in model["attention"]:
        console.print(escape(sentence), style="yellow" if sentence.startswith("warning") else None)
    forecasts = [*model["token_rounding"], *filter(None, [model["adapters"]])]
    for forecast in forecasts:
        console.print(escape(forecast["sentence"]))
