"""The doctor's report as tables."""

from __future__ import annotations

import os

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..layer import backends
from ..layer.experts_module import expert_parallel_remedy
from ..private.versions import untested_versions, versions
from .doctor import Device, ModelReport, devices

YES, NO = "[green]yes[/]", "[red]no[/]"


def print_doctor(report: ModelReport | None) -> None:
    """Versions, devices and, where a model was examined, its layers."""
    console = Console()
    console.print(_versions_table())
    for sentence in untested_versions():
        console.print(f"[yellow]{escape(sentence)}[/]")
    console.print(_devices_table(devices()))
    override = os.environ.get(backends.VARIABLE)
    console.print(f"{backends.VARIABLE} is {'not set' if override is None else repr(override)}")
    console.print(f"token rounding under expert parallelism: {escape(expert_parallel_remedy())}\n")
    if report is not None:
        _print_model(console, report)


def _versions_table() -> Table:
    table = Table(title="Versions", title_justify="left", show_header=False)
    for package, version in versions().items():
        table.add_row(package, version, style="dim" if version == "not installed" else None)
    return table


def _devices_table(devices: list[Device]) -> Table:
    """One row per device and backend; dtypes that get the same share it."""
    table = Table("device", "dtypes", "backend", "why", title="Devices", title_justify="left")
    for device in devices:
        shared: dict[tuple[str, str], list[str]] = {}
        for dtype, choice in device.backends.items():
            shared.setdefault(choice, []).append(dtype)
        for (backend, reason), dtypes in shared.items():
            table.add_row(f"{device.name} ({escape(device.description)})", ", ".join(dtypes), backend, escape(reason))
    return table


def _print_model(console: Console, report: ModelReport) -> None:
    if not report.layers:
        console.print(
            f"[red]{escape(report.name)} ({report.architecture}) has no mixture-of-experts layer that goes through "
            "Transformers' experts interface: there is nothing to accelerate.[/]"
        )
        return
    table = Table(title=f"{escape(report.name)} ({report.architecture})", title_justify="left")
    for heading in ("layers", "family", "supported", "backend", "token rounding"):
        table.add_column(heading, no_wrap=True)
    for layers in report.layers:
        family, supported, token_rounding = layers.support[1:4]
        backend = report.here.backend if supported else "-"
        table.add_row(
            escape(layers.name), family or "-", YES if supported else NO, backend, YES if token_rounding else NO
        )
    console.print(table)
    here = report.here
    console.print(f"backend here: {here.backend} ({here.device}, {here.dtype}): {escape(here.reason)}")
    for layers in report.layers:  # below the table: reasons are sentences, and a terminal may be narrow
        console.print(f"{escape(layers.name)}: {escape(layers.support.reason)}")
        if layers.kernels is not None:
            console.print(f"{escape(layers.name)}: {escape(layers.kernels)}")
    for sentence in report.attention:
        console.print(escape(sentence), style="yellow" if sentence.startswith("warning") else None)
    for forecast in report.rounding:
        console.print(escape(forecast.sentence()))
    if report.adapters is not None:
        console.print(escape(report.adapters.sentence()))
