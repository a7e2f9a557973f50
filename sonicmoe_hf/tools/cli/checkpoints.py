"""`sonicmoe-hf convert` and `sonicmoe-hf merge`."""

from __future__ import annotations

import time

from ...adapters.engines import ENGINES
from ...errors import CheckpointError
from ...model_patches import NATIVE_FAMILIES
from .bar import progress

HUB_LAYOUTS = {family.hub_layout for family in NATIVE_FAMILIES.values()}  # which --layout calls hub


def convert(
    src: str, dst: str, layout: str, trained_on: str | None, base_model: str | None, verify: bool, **of_models
) -> int:
    """Run `sonicmoe-hf convert`."""
    from ...adapters.convert import is_adapter
    from ...checkpoints.convert import convert_checkpoint
    from ...checkpoints.rounded import round_checkpoint

    given = {name: value for name, value in of_models.items() if value is not None}
    if is_adapter(src):
        for name in given:
            raise CheckpointError(f"--{name.replace('_', '-')} is for models, but {src} is an adapter")
        return _convert_adapter(src, dst, layout, trained_on, base_model, verify)
    if layout in ENGINES or trained_on is not None or base_model is not None:
        option = "--trained-on" if trained_on is not None else "--base-model"
        option = f"--layout {layout}" if layout in ENGINES else option
        raise CheckpointError(
            f"{option} is for adapters, and {src} is no folder with adapter_config.json: download one of the hub first, "
            "hf download ORG/NAME --local-dir FOLDER; engines load models in the hub's layout: --layout hub"
        )
    if (format := given.pop("round", None)) is not None:
        for name in set(given) - {"max_shard_size", "revision"}:
            raise CheckpointError(
                f"--round leaves experts dense, in the hub's layout and their own dtype; leave "
                f"--{name.replace('_', '-')} out"
            )
        if layout != "hub":
            raise CheckpointError(
                "--round leaves experts dense, in the hub's layout and their own dtype; give --layout hub in place of "
                f"{layout}"
            )
        return _write("rounding", round_checkpoint, src, dst, format, verify=verify, **given)
    return _write("converting", convert_checkpoint, src, dst, layout, verify=verify, **given)


def _convert_adapter(
    src: str, dst: str, layout: str, trained_on: str | None, base_model: str | None, verify: bool
) -> int:
    from rich.console import Console

    from ...adapters.convert import run_adapter_conversion

    hints = run_adapter_conversion(src, dst, layout, trained_on=trained_on, base_model=base_model, verify=verify)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{dst}: the adapter in the {layout} layout{', verified' if verify else ''}", markup=False)
    for hint in hints:
        console.print(f"note: {hint}", markup=False)
    return 0


def merge(base: str, adapter: str, dst: str, **options) -> int:
    """Run `sonicmoe-hf merge`."""
    from ...adapters.merge import merge_adapter

    given = {name: value for name, value in options.items() if value is not None}
    return _write("merging", merge_adapter, base, adapter, dst, **given)


def _write(description: str, write, *arguments, verify: bool, **options) -> int:
    """Call `write` to make a checkpoint, under a bar; print what was written, in how many seconds, and the notices."""
    from rich.console import Console

    start = time.perf_counter()
    with progress(description, of_bytes=True) as on_progress:
        done = write(*arguments, verify=verify, on_progress=on_progress, **options)
    layouts = ["hub" if each in HUB_LAYOUTS else each for each in (done.source_layout, done.target_layout)]
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{done.path}: {done.family}, {' -> '.join(layouts)}, {done.tensors} tensors, "
        f"{done.nbytes / 1e9:.2f} GB in {done.shards} files, {time.perf_counter() - start:.0f} s"
        f"{', verified' if verify else ''}",
        markup=False,
    )
    if done.roundings:
        _print_roundings(done.roundings)
    for notice in done.notices:
        console.print(f"note: {notice}", markup=False)
    return 0


def _print_roundings(roundings) -> None:
    """Print by layer the adapter's change beside what rounding added to it, and how much of it the layer's worst and its
    median matrix have."""
    from rich.table import Table

    from .console import make_console

    table = Table("layer", "adapter's change", "rounding error", "left: worst", "median", title_justify="left")
    for layer in roundings:
        shares = (f"{share:.1%}" for share in (layer.worst, layer.median))
        table.add_row(layer.layer, f"{layer.change:.4g}", f"{layer.error:.4g}", *shares)
    make_console().print(table)
