"""`sonicmoe-hf convert`, `sonicmoe-hf merge` and `sonicmoe-hf inspect`."""

from __future__ import annotations

import argparse
import json
import time

from ..lora.engines import ENGINES
from .bar import progress

DEFAULT_SHARD_SIZE = "5GB"
OF_MODELS = (
    "dtype",
    "dequantize",
    "quantize",
    "max_shard_size",
    "revision",
)  # options of convert that adapters have not


def add_commands(commands) -> None:
    """Add them to the subparsers of `sonicmoe-hf`."""
    _add_convert(commands)
    _add_merge(commands)
    _add_inspect(commands)


def _add_convert(commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert a checkpoint to the native layout, or back to the hub's",
        description="Converts a checkpoint (folder or hub id) to the native layout, or back to the hub's, one file at a "
        "time and bit by bit; a folder with a LoRA adapter is converted too, also to what inference engines load. The "
        "result appears whole or not at all. "
        "Exit code: 0 if it is there, 2 if nothing was written.",
    )
    convert.add_argument("src", metavar="SRC", help="folder or hub id")
    convert.add_argument("dst", metavar="DST", help="new folder")
    convert.add_argument(
        "--layout",
        choices=("native", "hub", *ENGINES),
        required=True,
        help="the layout to convert to; vllm and sglang are for adapters",
    )
    convert.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="cast weights (default: as stored)"
    )
    convert.add_argument(
        "--dequantize",
        action=argparse.BooleanOptionalAction,
        help="MXFP4, FP8 and NVFP4 weights to bfloat16 (default: do it and say so)",
    )
    convert.add_argument(
        "--quantize",
        choices=("nf4", "mxfp4", "fp8", "nvfp4"),
        help="pack the experts: with --layout native to train adapters on them, with --layout hub as "
        "engines read them (mxfp4 for gpt-oss, fp8 for the others)",
    )
    _add_writing_options(convert)
    convert.set_defaults(max_shard_size=None)  # which says whether it was given
    convert.add_argument("--revision", help="of a hub id")
    convert.add_argument(
        "--trained-on",
        metavar="MODEL",
        help="for an adapter: the folder or hub id of the model it was trained on (default: what it says)",
    )
    convert.set_defaults(run=_run_convert)


def _add_writing_options(command) -> None:
    command.add_argument(
        "--max-shard-size", default=DEFAULT_SHARD_SIZE, help=f"of the files written (default {DEFAULT_SHARD_SIZE})"
    )
    command.add_argument("--verify", action="store_true", help="refuse NaN, read everything back and compare")


def _add_merge(commands) -> None:
    merge = commands.add_parser(
        "merge",
        help="add a LoRA adapter to the weights of its model, for engines that load no adapters of experts",
        description="Writes BASE, of any family that Transformers loads, with ADAPTER's products added to its weights "
        "(W + scale * B A, in fp32, in the dtype of BASE), under the names of its files. ADAPTER is what PEFT saves, on "
        "experts (target_parameters) and on linear layers. The result appears whole or not at all. Exit code: 0 if it is "
        "there, 2 if nothing was written.",
    )
    merge.add_argument("base", metavar="BASE", help="folder or hub id of the model that the adapter was trained on")
    merge.add_argument("adapter", metavar="ADAPTER", help="folder or hub id")
    merge.add_argument("dst", metavar="DST", help="new folder")
    merge.add_argument("--layout", choices=("native", "hub"), help="of the result (default: that of BASE)")
    merge.add_argument(
        "--quantize",
        choices=("keep", "mxfp4", "fp8"),
        help="keep: in the format of BASE, rounding only what changed; mxfp4 (gpt-oss) "
        "or fp8: pack the experts (default: bfloat16)",
    )
    _add_writing_options(merge)
    merge.add_argument("--revision", help="of BASE, a hub id")
    merge.set_defaults(run=_run_merge)


def _add_inspect(commands) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="family, layout, dtype and sizes of a checkpoint, and what conversion would make of it",
        description="Reads the config and the headers of a checkpoint (folder or hub id) and checks them against each "
        "other. Exit code: 0 if it can be converted, 2 if not.",
    )
    inspect.add_argument("path", metavar="PATH", help="folder or hub id")
    inspect.add_argument("--revision", help="of a hub id")
    inspect.add_argument(
        "--json", action="store_true", help='print JSON instead of a table; errors are {"error": ...}'
    )
    inspect.set_defaults(run=_run_inspect)


def _run_convert(arguments) -> int:
    from rich.console import Console

    from ..checkpoints.convert import convert_checkpoint
    from ..errors import CheckpointError
    from ..lora.convert import is_adapter, run_adapter_conversion

    if is_adapter(arguments.src):
        for option in OF_MODELS:
            if getattr(arguments, option) is not None:
                raise CheckpointError(f"--{option.replace('_', '-')} is for models, but {arguments.src} is an adapter")
        converted = run_adapter_conversion(
            arguments.src, arguments.dst, arguments.layout, trained_on=arguments.trained_on, verify=arguments.verify
        )
        verified = ", verified" if arguments.verify else ""
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{arguments.dst}: the adapter in the {arguments.layout} layout{verified}", markup=False)
        for hint in converted.hints:
            console.print(f"note: {hint}", markup=False)
        return 0
    if arguments.layout in ENGINES:
        raise CheckpointError(
            f"--layout {arguments.layout} is for adapters, and {arguments.src} is no folder with adapter_config.json: "
            f"download one of the hub first, hf download ORG/NAME --local-dir FOLDER; engines load models in the hub's "
            "layout: --layout hub"
        )
    if arguments.trained_on is not None:
        raise CheckpointError(f"--trained-on is for adapters, but {arguments.src} is none")
    start = time.perf_counter()
    with progress("converting", of_bytes=True) as on_progress:
        done = convert_checkpoint(
            arguments.src,
            arguments.dst,
            arguments.layout,
            dtype=arguments.dtype,
            dequantize=arguments.dequantize,
            quantize=arguments.quantize,
            max_shard_size=DEFAULT_SHARD_SIZE if arguments.max_shard_size is None else arguments.max_shard_size,
            verify=arguments.verify,
            revision=arguments.revision,
            on_progress=on_progress,
        )
    _print_done(done, start, arguments.verify)
    return 0


def _run_merge(arguments) -> int:
    from ..lora.merge import merge_adapter

    start = time.perf_counter()
    with progress("merging", of_bytes=True) as on_progress:
        done = merge_adapter(
            arguments.base,
            arguments.adapter,
            arguments.dst,
            arguments.layout,
            quantize=arguments.quantize,
            max_shard_size=arguments.max_shard_size,
            verify=arguments.verify,
            revision=arguments.revision,
            on_progress=on_progress,
        )
    _print_done(done, start, arguments.verify)
    return 0


def _print_done(done, start: float, verified: bool) -> None:
    """What was written, in how many seconds since `start`, and the notices."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"{done.path}: {done.family}, {done.source_layout} -> {done.target_layout}, {done.tensors} tensors, "
        f"{done.nbytes / 1e9:.2f} GB in {done.shards} files, {time.perf_counter() - start:.0f} s"
        f"{', verified' if verified else ''}",
        markup=False,
    )
    if done.roundings:
        _print_roundings(done.roundings)
    for notice in done.notices:
        console.print(f"note: {notice}", markup=False)


def _print_roundings(roundings) -> None:
    """By layer, the adapter's change beside what rounding added to it."""
    from rich.console import Console
    from rich.table import Table

    table = Table("layer", "adapter's change", "rounding error", "of the change left", title_justify="left")
    for layer in roundings:
        table.add_row(layer.layer, f"{layer.change:.4g}", f"{layer.error:.4g}", f"{layer.survived:.1%}")
    Console().print(table)


def _run_inspect(arguments) -> int:
    from ..checkpoints.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(arguments.path, arguments.revision)
    if arguments.json:
        of_a_weight = {"bytes_per_expert_weight": inspection.bytes_per_expert_weight}
        print(json.dumps({**inspection._asdict(), **of_a_weight, "folder": str(inspection.folder)}, indent=2))
    else:
        _print_inspection(inspection)
    return 0


def _experts_size(inspection) -> str:
    """What the experts' weights take, and beside it what they would take in bf16."""
    each = inspection.bytes_per_expert_weight
    stored = f"{inspection.expert_nbytes / 1e9:.2f} GB, {each:.5g} bytes a weight"
    if inspection.quantization is None:
        return stored
    return (
        f"{stored} with its scales ({8 * each:.4g} bits); {2 * inspection.expert_parameters / 1e9:.2f} GB in bfloat16"
    )


def _print_inspection(inspection) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    dtypes = ", ".join(f"{name} {nbytes / 1e9:.2f} GB" for name, nbytes in inspection.dtypes.items())
    table = Table(title=escape(str(inspection.folder)), title_justify="left", show_header=False)
    table.add_row("family", inspection.family)
    table.add_row("layout", escape(inspection.description))
    table.add_row("stored as", dtypes if inspection.quantization is None else f"{inspection.quantization}: {dtypes}")
    table.add_row(
        "size",
        f"{inspection.parameters / 1e9:.2f} B parameters, {inspection.nbytes / 1e9:.2f} GB in {inspection.files} files",
    )
    table.add_row(
        "experts",
        f"{inspection.layers} layers of {inspection.num_experts}, hidden size {inspection.hidden_size}, "
        f"intermediate size {inspection.intermediate_size}",
    )
    table.add_row("their weights", _experts_size(inspection))
    for target, words in inspection.conversions.items():
        table.add_row(f"convert to {target}", escape(words))
    Console().print(table)
