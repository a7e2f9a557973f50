"""The `sonicmoe-hf` command: demo, doctor, warmup. The other commands have files of their own."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import json
import logging
import sys
import time
from pathlib import Path

from .. import __version__
from ..autopatch.program import ProgramError
from ..errors import CheckpointError, DoctorError, WarmupError
from ..kernels.activation import ACTIVATIONS
from ..layer.config import LAYOUTS, ROUNDINGS
from .bar import progress
from .checkpoints import add_commands
from .example import add_example
from .plan import add_plan
from .run import add_run, split_program

MAX_DIGITS = 12  # of a number on the command line
DEMO_PACKAGES = ("accelerate", "matplotlib")


class CommandError(Exception):
    """What the command line asks for cannot be done; the message says why and what to do."""


class _UsageError(Exception):
    """The command line cannot be read: its parser, and what is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise _UsageError(self, message)


def _at_least(least: int):
    def whole_number(text: str) -> int:
        if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def _version() -> str:
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return f"sonicmoe-hf {__version__} ({packages})"


class _VersionAction(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        print(_version())
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The command line of `sonicmoe-hf`."""
    parser = _Parser(prog="sonicmoe-hf", description="SonicMoE for Hugging Face Transformers")
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_doctor(commands)
    _add_demo(commands)
    _add_warmup(commands)
    add_plan(commands, _at_least)
    add_commands(commands)
    add_run(commands)
    add_example(commands)
    return parser


def _add_doctor(commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, backends; for a model: what is supported, what computes it here, and why",
        description="Prints versions, devices and the backend chosen for each. With a model (hub id or local folder; "
        "only its config is read) also which of its layers are accelerated, where token rounding works, and why not "
        "elsewhere. Exit code: 0 if sonicmoe_hf computes all mixture-of-experts layers (which backend does here, and "
        "whether it accelerates them, is printed), 1 if not, 2 if the model cannot be examined.",
    )
    doctor.add_argument("model", nargs="?", help="hub id or local folder")
    doctor.add_argument("--json", action="store_true", help='print JSON instead of tables; errors are {"error": ...}')
    doctor.add_argument("--batch-size", type=_at_least(1), help="sequences per forward and device")
    doctor.add_argument(
        "--sequence-length",
        type=_at_least(1),
        help="tokens per sequence; with --batch-size, says whether token rounding applies or falls back to top-k",
    )
    doctor.add_argument("--tile", type=_at_least(1), help="token rounding's tile in rows (default 128)")
    doctor.set_defaults(run=_run_doctor)


def _add_demo(commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small mixture-of-experts model with token rounding, on any machine",
        description="Trains a small Qwen3-MoE-architecture model on the standard library's sources with token rounding, "
        "evaluates it with top-k, saves it, reloads it through Transformers, compares logits, and draws pictures.",
    )
    demo.add_argument("--steps", type=_at_least(4), default=400, help="optimiser steps (default %(default)s)")
    demo.add_argument("--output", type=Path, default=Path("outputs/demo"), help="folder (default %(default)s)")
    demo.add_argument(
        "--rounding",
        choices=("top_k", *ROUNDINGS),
        default="nearest",
        help="token rounding's policy, or top_k for none (default %(default)s)",
    )
    demo.add_argument("--tile", type=_at_least(1), default=64, help="tile in rows (default %(default)s)")
    demo.add_argument("--seed", type=_at_least(0), default=0, help="(default %(default)s)")
    demo.set_defaults(run=_run_demo)


def _sizes(text: str) -> tuple[int, int]:
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.isdecimal() and len(size) <= MAX_DIGITS and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not H,I: two whole numbers, such as 2048,768")
    return int(sizes[0]), int(sizes[1])


def _add_warmup(commands) -> None:
    warmup = commands.add_parser(
        "warmup",
        help="compile a model's Hopper kernels ahead of the first step",
        description="Compiles every Hopper kernel that the layers of a model (hub id or local folder; only its config is "
        "read) or of given sizes need, forward, backward and with frozen parts, into the cache on disk "
        "(SONICMOE_HF_CACHE, or ~/.cache/sonicmoe_hf). Needs no GPU. Exit code: 0 if all are there, 1 if a layer's sizes "
        "are not for these kernels, 2 if nothing could be compiled.",
    )
    warmup.add_argument("model", nargs="?", help="hub id or local folder")
    warmup.add_argument(
        "--shape",
        type=_sizes,
        action="append",
        metavar="H,I",
        default=[],
        help="hidden and intermediate size of a layer; may be given several times",
    )
    warmup.add_argument(
        "--layout",
        choices=sorted(LAYOUTS),
        default="concatenated",
        help="of --shape's weights (default %(default)s, the hub's)",
    )
    warmup.add_argument("--activation", choices=ACTIVATIONS, default="swiglu", help="of --shape (default %(default)s)")
    warmup.add_argument("--bias", action="store_true", help="--shape's experts have biases")
    warmup.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(default %(default)s)")
    warmup.add_argument("--processes", type=_at_least(1), help="that compile at a time (default: one for each CPU)")
    warmup.set_defaults(run=_run_warmup)


def _run_doctor(arguments) -> int:
    from . import doctor, doctor_tables

    if (arguments.batch_size is None) != (arguments.sequence_length is None):
        raise CommandError("--batch-size and --sequence-length belong together: give both")
    if arguments.tile is not None and arguments.batch_size is None:
        raise CommandError("--tile needs --batch-size and --sequence-length")
    examined = None
    if arguments.model is not None:
        examined = doctor.examine(
            arguments.model,
            batch_size=arguments.batch_size,
            sequence_length=arguments.sequence_length,
            tile=arguments.tile,
        )
    elif arguments.batch_size is not None:
        raise CommandError(
            "--batch-size and --sequence-length need a model: sonicmoe-hf doctor MODEL --batch-size ..."
        )
    if arguments.json:
        print(json.dumps(doctor.as_json(examined), indent=2))
    else:
        doctor_tables.print_doctor(examined)
    return 0 if examined is None or examined.supported else 1


def _run_demo(arguments) -> int:
    missing = [package for package in DEMO_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise CommandError(f"the demo needs {' and '.join(missing)}: pip install 'sonicmoe-hf[train]'")
    for library in (
        "torchao",
        "bitsandbytes",
        "DeepSpeed",
        "torch.utils._pytree",
    ):  # on import they say what a CPU lacks
        logging.getLogger(library).setLevel(logging.ERROR)
    from ..demo.run import DemoSettings, run

    try:
        settings = DemoSettings(
            steps=arguments.steps,
            output=arguments.output,
            rounding=arguments.rounding,
            tile=arguments.tile,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    return run(settings)


def _run_warmup(arguments) -> int:
    import torch

    from ..checkpoints.config_only import build_on_meta
    from . import warmup

    if (arguments.model is None) == (not arguments.shape):
        raise CommandError(
            "give a model, or --shape H,I: sonicmoe-hf warmup MODEL, or sonicmoe-hf warmup --shape 2048,768"
        )
    dtype = getattr(torch, arguments.dtype)
    if arguments.model is None:
        activation = warmup.Activation(arguments.activation)
        facts = dtype, activation, arguments.layout, arguments.bias
        kinds = [warmup.LayerKind(hidden, inner, *facts) for hidden, inner in arguments.shape]
    else:
        kinds = warmup.kinds_of_model(build_on_meta(arguments.model), dtype)
        if not kinds:
            raise CommandError(f"{arguments.model} has no layer that is supported; sonicmoe-hf doctor says why")
    return _print_warmup(kinds, arguments.processes)


def _print_warmup(kinds, processes) -> int:
    from . import warmup

    began = time.perf_counter()
    total, outcomes = warmup.warm_up(kinds, processes)
    for kind in kinds:
        print(kind)
    compiled = 0
    with progress("compiling") as move:
        move(0, total)
        for number, outcome in enumerate(outcomes, 1):
            compiled += outcome.seconds is not None
            what = "was there" if outcome.seconds is None else f"compiled in {outcome.seconds:.1f} s"
            print(f"[{number:{len(str(total))}}/{total}] {outcome.kernel} {what}", flush=True)
            move(number, total)
    seconds = time.perf_counter() - began
    print(f"{total} kernels in {warmup.cache_folder()}: {compiled} compiled now, {seconds:.1f} s")
    refused = [kind for kind in kinds if warmup.on_triton(kind.hidden, kind.inner, kind.activation)]
    for kind in refused:
        print(warmup.placement(kind.hidden, kind.inner, kind.activation))
    return 1 if refused else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code. An error is one line on standard error, or with --json an object."""
    arguments, program = split_program(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may hold bytes that are no text
    try:
        parsed = build_parser().parse_args(arguments)
        parsed.program = program
        return parsed.run(parsed)
    except _UsageError as error:
        parser, message = error.args
        if not as_json:
            argparse.ArgumentParser.error(parser, message)
        return _say(message, as_json, 2)
    # what this package or the system says of an input, such as a folder that another user keeps closed
    except (CheckpointError, CommandError, DoctorError, OSError, ProgramError, ValueError, WarmupError) as error:
        return _say(" ".join(str(error).split()) or type(error).__name__, as_json, 2)
    except KeyboardInterrupt:
        return _say("interrupted", as_json, 130)


def _say(message: str, as_json: bool, code: int) -> int:
    if as_json:
        print(json.dumps({"error": message}, indent=2))
    else:
        print(f"sonicmoe-hf: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
