"""The commands of `sonicmoe-hf` and their options. Each is a function of the command's name, which takes the options by
their names and returns the exit code. Nothing here imports torch, which takes seconds."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ...kernels.activation import ACTIVATIONS
from ...layer.config import LAYOUTS, ROUNDINGS, SAVE_CHOICES
from ...streaming.units import parse_bytes
from ..autopatch.settings import ROUTINGS

Option = tuple[tuple[str, ...], dict[str, Any]]  # the arguments of argparse's add_argument
FORMATS = ("nf4", "mxfp4", "fp8", "nvfp4", "int4", "uint4")
WITH_ZEROS = "uint4: int4 with a zero for each group"
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS_OF_FILES = ("native", "hub", "vllm", "sglang")


class Command(NamedTuple):
    """A command. module: where its function is, in this package; line: in the list of commands; imports_torch: and all of
    sonicmoe_hf."""

    module: str
    line: str
    description: str
    options: tuple[Option, ...]
    usage: str | None = None
    imports_torch: bool = True


def _option(*names: str, **settings) -> Option:
    """Declare an option, or an argument without dashes."""
    return names, settings


def _at_least(least: int) -> Callable[[str], int]:
    """Make the type of an option that is a whole number."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def gibibytes(text: str) -> float:
    """Read GiB from "23.5GiB" or MiB, or from a card's name, "80GB" or "80", of which LARGE or SMALL is there."""
    given = re.sub(r"(?<=[MGT])B?$", "iB", text.strip(), flags=re.IGNORECASE)
    unit = "" if given[-1:].lower() == "b" else "GiB"
    try:
        gib = parse_bytes(given + unit, GPU_MEMORY) / 2**30
    except ValueError:
        raise argparse.ArgumentTypeError(GPU_MEMORY.format(repr(text))) from None
    if CARD_NAME.search(text):
        return math.floor(10 * gib * (LARGE if gib >= 80 else SMALL)) / 10
    return gib


def _sizes(text: str) -> tuple[int, int]:
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not H,I: two whole numbers, such as 2048,768")
    return int(sizes[0]), int(sizes[1])


def _json(contents: str = " instead of tables") -> Option:
    return _option(
        "--json", dest="as_json", action="store_true", help=f'print JSON{contents}; errors are {{"error": ...}}'
    )


# GiB for each GB of a card's name, from 80 GB on and below. torch has 139.7 to 139.8 GiB of an H200, 79.1 to 79.3 of an
# A100 or H100, 31.3 of an RTX 5090, 23.6 to 23.7 of an RTX 3090 or 4090, 23.5 of an A30: "GPU 0 has a total capacity of
# ..." in what people report of its OutOfMemoryError. Where ECC lies in that memory, as in A10 and L4, 22 GiB are there.
LARGE, SMALL = 0.988, 0.98
CARD_NAME = re.compile(r"[\d.]\s*(GB?)?\s*$", flags=re.IGNORECASE)
GPU_MEMORY = "it is {}; give the memory of a GPU in MiB, MB, GiB, GB or TiB, such as 80GB, 23.5GiB or 24564MiB"
MODEL = "hub id or local folder"
SHAPE = "hidden and intermediate size of a layer; may be given several times"
BASE = _option("base", metavar="BASE", help="folder or hub id of the model that the adapter was trained on")
OF_WRITTEN = (  # options of what writes a checkpoint
    _option("dst", metavar="DST", help="new folder"),
    _option("--max-shard-size", help="of the files written (default 5GB)"),
    _option("--verify", action="store_true", help="raise an error for NaN, read everything back and compare"),
)
COMMANDS = {
    "doctor": Command(
        "doctor",
        "versions, devices, backends; for a model: what is supported, what computes it here, and why",
        """Print versions, devices and the backend chosen for each. With a model (hub id or local folder; only its config
        is read) also which of its layers are accelerated, where token rounding works, and why not elsewhere. Exit
        code: 0 if sonicmoe_hf computes all mixture-of-experts layers (which backend does here, and whether it
        accelerates them, is printed), 1 if not, 2 if the model cannot be examined.""",
        (
            _option("model", nargs="?", help=MODEL),
            _json(),
            _option("--batch-size", type=_at_least(1), help="sequences per forward and device"),
            _option(
                "--sequence-length", type=_at_least(1), help="tokens of each; with both: whether rounding applies"
            ),
            _option("--tile", type=_at_least(1), help="token rounding's tile in rows (default 128)"),
        ),
    ),
    "demo": Command(
        "demo",
        "train a small mixture-of-experts model with token rounding, on any machine",
        """Train a small Qwen3-MoE-architecture model on the standard library's sources with token rounding, evaluate it
        with top-k, save it, reload it through Transformers, compare logits, and draw pictures.""",
        (
            _option("--steps", type=_at_least(4), default=400, help="optimiser steps (default %(default)s)"),
            _option("--output", type=Path, default=Path("outputs/demo"), help="folder (default %(default)s)"),
            _option("--rounding", choices=("top_k", *ROUNDINGS), default="nearest", help="(default %(default)s)"),
            _option("--tile", type=_at_least(1), default=64, help="of token rounding, in rows (default %(default)s)"),
            _option("--seed", type=_at_least(0), default=0, help="(default %(default)s)"),
        ),
    ),
    "warmup": Command(
        "warmup",
        "compile a model's Hopper kernels ahead of the first step",
        """Compile every Hopper kernel that the layers of a model (hub id or local folder; only its config is read) or of
        given sizes need, forward, backward and with frozen parts, into the cache on disk (SONICMOE_HF_CACHE, or
        ~/.cache/sonicmoe_hf). Needs no GPU. Exit code: 0 if all are there, 1 if a layer's sizes are not for these
        kernels, 2 if nothing could be compiled. With --compile 1 if something of the layers is left uncompiled.""",
        (
            _option("model", nargs="?", help=MODEL),
            _option("--shape", type=_sizes, action="append", metavar="H,I", default=[], help=SHAPE),
            _option(
                "--layout", choices=sorted(LAYOUTS), default="concatenated", help="of --shape (default the hub's)"
            ),
            _option("--activation", choices=ACTIVATIONS, default="swiglu", help="of --shape (default %(default)s)"),
            _option("--bias", action="store_true", help="--shape's experts have biases"),
            _option("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(default %(default)s)"),
            _option("--processes", type=_at_least(1), help="that compile at a time (default: one for each CPU)"),
            _option(
                "--compile",
                action="store_true",
                help="instead train a step of the model's first layers, with random weights, adapters and "
                "torch_compile=True, on this machine's device: torch's cache on disk then has the compiled layers",
            ),
            _option(
                "--quantize",
                choices=FORMATS,
                help=f"the experts are packed, and have adapters of --rank (default: not packed; {WITH_ZEROS})",
            ),
            _option(
                "--rank",
                type=_at_least(1),
                default=16,
                help="of --compile and --quantize: the adapters' (default %(default)s)",
            ),
            _option(
                "--batch-size", type=_at_least(1), default=1, help="of --compile: sequences (default %(default)s)"
            ),
            _option("--tokens", type=_at_least(2), help="of --compile: of every sequence (default: any number)"),
            _option("--liger", action="store_true", help="of --compile: with use_liger_kernel=True"),
        ),
    ),
    "plan": Command(
        "plan",
        "which ways of training a model fit on which GPUs, and the command of each",
        """Read a model's config.json alone (hub id or local folder) and print which ways of training fit, GiB of a GPU
        by part at the peak, and the command of each, which runs this package's examples. Exit code: 0 if a way fits,
        1 if none does, 2 if the model cannot be planned for.""",
        (
            _option("model", help=MODEL),
            _option("--gpus", type=_at_least(1), default=1, help="of one machine (default %(default)s)"),
            _option(
                "--gpu-memory",
                type=gibibytes,
                default="80GB",
                metavar="80GB",
                help="of each: by a card's name, 80GB (default) for 79 GiB or 24GB for 23.5, or as sonicmoe-hf doctor "
                "prints it there, such as 22.1GiB, or MiB",
            ),
            _option("--tokens", type=_at_least(1), help="of a step on each GPU (default: 4096, or one sequence)"),
            _option("--sequence-length", type=_at_least(1), default=4096, help="at most (default %(default)s)"),
            _option("--method", choices=("full", "lora", "qlora"), help="default: all"),
            _option("--all", action="store_true", help="also experts packed in formats that are seldom chosen"),
            _json(", with what does not fit"),
        ),
    ),
    "convert": Command(
        "checkpoints",
        "convert a checkpoint to the native layout or the hub's, or an adapter to what engines load",
        """Convert a checkpoint (folder or hub id) to the native layout, or back to the hub's, one file at a time and bit
        by bit; a folder with a LoRA adapter is converted too, also to what inference engines load. The result appears
        whole or not at all. Exit code: 0 if it is there, 2 if nothing was written.""",
        (
            _option("src", metavar="SRC", help="folder or hub id"),
            *OF_WRITTEN,
            _option("--layout", choices=LAYOUTS_OF_FILES, required=True, help="vllm and sglang are for adapters"),
            _option("--dtype", choices=DTYPES, help="cast weights (default: as stored)"),
            _option(
                "--dequantize",
                action=argparse.BooleanOptionalAction,
                help="MXFP4, FP8 and NVFP4 weights to bfloat16 (default: do it and say so)",
            ),
            _option(
                "--quantize",
                choices=FORMATS,
                help="pack the experts: with --layout native to train adapters on them, with --layout hub as engines "
                f"read them (mxfp4 for gpt-oss, fp8 or int4 for the others); {WITH_ZEROS}",
            ),
            _option(
                "--round",
                choices=FORMATS,
                help="with --layout hub: leave experts dense, at the values that they have packed in this format, for "
                f"engines that serve what is trained with --experts-quantization; {WITH_ZEROS}",
            ),
            _option("--revision", help="of a hub id"),
            _option("--trained-on", metavar="MODEL", help="for an adapter: its base (default: what it says)"),
            _option("--base-model", metavar="MODEL", help="that a converted adapter names (default: its own)"),
        ),
    ),
    "merge": Command(
        "checkpoints",
        "add a LoRA adapter to the weights of its model, for engines that load no adapters of experts",
        """Write BASE, of any family that Transformers loads, with ADAPTER's products added to its weights (W + scale * B
        A, in fp32, in the dtype of BASE), under the names of its files. ADAPTER is what PEFT saves, on experts
        (target_parameters) and on linear layers. The result appears whole or not at all. Exit code: 0 if it is there,
        2 if nothing was written.""",
        (
            BASE,
            _option("adapter", metavar="ADAPTER", help="folder or hub id"),
            *OF_WRITTEN,
            _option("--layout", choices=("native", "hub"), help="of the result (default: that of BASE)"),
            _option(
                "--quantize",
                choices=("keep", "mxfp4", "fp8", "int4"),
                help="keep: in the format of BASE, rounding only what changed; mxfp4 (gpt-oss), fp8 or int4: pack "
                "the experts (default: bfloat16)",
            ),
            _option(
                "--rounding",
                choices=("dithered", "nearest"),
                help="of what ADAPTER changes in packed weights that stay packed: up or down so that the mean is exact, "
                "or to nearest, which drops small changes (default: dithered)",
            ),
            _option("--revision", help="of BASE, a hub id"),
        ),
    ),
    "check": Command(
        "check",
        "whether an adapter does what was trained: merged, converted, or on a running server",
        """Compute the log-probabilities of some text with BASE and with ADAPTER on it, by Transformers and PEFT, and say
        whether each FOLDER and a server's model give the same: a merged checkpoint, or the adapter in the form of an
        engine. Beside the verdict stand the mean differences of a token's log-probability, and how much of the
        adapter's change is there. Exit code: 0 if the adapter is applied everywhere, 1 if it is not, 2 if something
        cannot be read, compared or told.""",
        (
            BASE,
            _option("adapter", metavar="ADAPTER", help="folder or hub id of the adapter, as it was saved"),
            _option("folders", metavar="FOLDER", nargs="*", help="merged, or the adapter in another form"),
            _option("--server", metavar="URL", help="of a running server (vLLM, SGLang, transformers serve)"),
            _option("--model", default="", metavar="NAME", help="of the adapter or merged model on the server"),
            _option("--text", metavar="FILE", help="like what it was trained on (default: documentation of Python)"),
            _option("--dtype", choices=("auto", *DTYPES), default="auto", help="to compute in (default: the model's)"),
            _option("--experts-memory", metavar="8GiB", help="of the GPU for experts, which live in host memory"),
            _option("--experts-quantization", metavar="FORMAT", help="in which the adapter was trained on BASE"),
            _json(),
        ),
    ),
    "run": Command(
        "run",
        "run a program (trl sft ..., script.py, -m module) with every model that it builds patched",
        """Run a program with every Transformers model that it or its children build patched, and say at the first
        training step what was patched, by which backend, or why not. PROGRAM is a command (trl, llamafactory-cli,
        axolotl, swift, accelerate, torchrun), a Python file, or -m and a module; all that follows is its own. These
        take over the process, so that arguments, exit code, signals, standard input and tracebacks are the program's.
        Under a launcher: torchrun ... -m sonicmoe_hf run -- script.py.""",
        (
            _option("--routing", choices=ROUTINGS, default="top_k", help="in training (default %(default)s)"),
            _option("--tile", type=_at_least(1), metavar="ROWS", help="of token rounding (default 128)"),
            _option("--save", choices=SAVE_CHOICES, default="preactivation", help="what layers keep for backward"),
            _option(
                "--experts-quantization",
                choices=FORMATS,
                help=f"hold experts packed and frozen, once loaded ({WITH_ZEROS})",
            ),
            _option(
                "--adapt-experts", type=_at_least(1), metavar="RANK", help="add the experts to the program's LoRA"
            ),
            _option("--compile", action="store_true", help="have Trainers compile each layer, as their torch_compile"),
        ),
        usage="sonicmoe-hf run [--routing ROUTING] [--tile ROWS] [--save SAVE] [--experts-quantization FORMAT] "
        "[--adapt-experts RANK] [--compile] -- PROGRAM [ARGUMENT ...]",
        imports_torch=False,
    ),
    "example": Command(
        "example",
        "print an example, to run and to change; without a name, list them",
        "Print an example: sonicmoe-hf example finetune > finetune.py. Without a name, list them.",
        (_option("name", nargs="?", help="such as finetune, qlora or fsdp2.yaml"),),
        imports_torch=False,
    ),
}
