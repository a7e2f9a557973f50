"""`sonicmoe-hf convert` and `sonicmoe-hf merge`."""

from __future__ import annotations

import argparse
import time

from ...errors import CheckpointError
from ...lora.engines import ENGINES
from ...model_patches import NATIVE_FAMILIES
from .bar import progress
from .command import command, option

DST = option("dst", metavar="DST", help="new folder")
VERIFY = option("--verify", action="store_true", help="raise an error for NaN, read everything back and compare")
HUB_LAYOUTS = {family.hub_layout for family in NATIVE_FAMILIES.values()}  # which --layout calls hub
SHARD_SIZE = option("--max-shard-size", help="of the files written (default 5GB)")


@command(
    option("src", metavar="SRC", help="folder or hub id"),
    DST,
    option(
        "--layout",
        choices=("native", "hub", *ENGINES),
        required=True,
        help="the layout to convert to; vllm and sglang are for adapters",
    ),
    option("--dtype", choices=("float32", "bfloat16", "float16"), help="cast weights (default: as stored)"),
    option(
        "--dequantize",
        action=argparse.BooleanOptionalAction,
        help="MXFP4, FP8 and NVFP4 weights to bfloat16 (default: do it and say so)",
    ),
    option(
        "--quantize",
        choices=("nf4", "mxfp4", "fp8", "nvfp4"),
        help="pack the experts: with --layout native to train adapters on them, with --layout hub as engines read them "
        "(mxfp4 for gpt-oss, fp8 for the others)",
    ),
    SHARD_SIZE,
    VERIFY,
    option("--revision", help="of a hub id"),
    option(
        "--trained-on",
        metavar="MODEL",
        help="for an adapter: the folder or hub id of the model it was trained on (default: what it says)",
    ),
)
def convert(src: str, dst: str, layout: str, trained_on: str | None, verify: bool, **of_models) -> int:
    """Convert a checkpoint (folder or hub id) to the native layout, or back to the hub's, one file at a time and bit by
    bit; a folder with a LoRA adapter is converted too, also to what inference engines load. The result appears whole or
    not at all. Exit code: 0 if it is there, 2 if nothing was written.
    """
    from ...checkpoints.convert import convert_checkpoint
    from ...lora.convert import is_adapter

    given = {name: value for name, value in of_models.items() if value is not None}
    if is_adapter(src):
        for name in given:
            raise CheckpointError(f"--{name.replace('_', '-')} is for models, but {src} is an adapter")
        return _convert_adapter(src, dst, layout, trained_on, verify)
    if layout in ENGINES or trained_on is not None:
        option = f"--layout {layout}" if layout in ENGINES else "--trained-on"
        raise CheckpointError(
            f"{option} is for adapters, and {src} is no folder with adapter_config.json: download one of the hub first, "
            "hf download ORG/NAME --local-dir FOLDER; engines load models in the hub's layout: --layout hub"
        )
    return _write("converting", convert_checkpoint, src, dst, layout, verify=verify, **given)


def _convert_adapter(src: str, dst: str, layout: str, trained_on: str | None, verify: bool) -> int:
    from rich.console import Console

    from ...lora.convert import run_adapter_conversion

    converted = run_adapter_conversion(src, dst, layout, trained_on=trained_on, verify=verify)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{dst}: the adapter in the {layout} layout{', verified' if verify else ''}", markup=False)
    for hint in converted.hints:
        console.print(f"note: {hint}", markup=False)
    return 0


@command(
    option("base", metavar="BASE", help="folder or hub id of the model that the adapter was trained on"),
    option("adapter", metavar="ADAPTER", help="folder or hub id"),
    DST,
    option("--layout", choices=("native", "hub"), help="of the result (default: that of BASE)"),
    option(
        "--quantize",
        choices=("keep", "mxfp4", "fp8"),
        help="keep: in the format of BASE, rounding only what changed; mxfp4 (gpt-oss) or fp8: pack the experts "
        "(default: bfloat16)",
    ),
    SHARD_SIZE,
    VERIFY,
    option("--revision", help="of BASE, a hub id"),
)
def merge(base: str, adapter: str, dst: str, **options) -> int:
    """Write BASE, of any family that Transformers loads, with ADAPTER's products added to its weights (W + scale * B A,
    in fp32, in the dtype of BASE), under the names of its files. ADAPTER is what PEFT saves, on experts
    (target_parameters) and on linear layers. The result appears whole or not at all. Exit code: 0 if it is there, 2 if
    nothing was written.
    """
    from ...lora.merge import merge_adapter

    given = {name: value for name, value in options.items() if value is not None}
    return _write("merging", merge_adapter, base, adapter, dst, **given)


def _write(description: str, write, *arguments, verify: bool, **options) -> int:
    """Call `write` to make a checkpoint, under a bar; print what was written, in how many seconds, and the notices."""
    from rich.console import Console

    start = time.perf_counter()
    with progress(description, of_bytes=True) as on_progress:
        done = write(*arguments, verify=verify, on_progress=on_progress, **options)
    layouts = ["hub" if each in HUB_LAYOUTS else each for each in (done.source_layout, done.target_layout)]
    console = Console(highlight=False)
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
    """Print by layer the adapter's change beside what rounding added to it."""
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "adapter's change", "rounding error", "of the change left", title_justify="left")
    for layer in roundings:
        table.add_row(layer.layer, f"{layer.change:.4g}", f"{layer.error:.4g}", f"{layer.survived:.1%}")
    Console().print(table)
