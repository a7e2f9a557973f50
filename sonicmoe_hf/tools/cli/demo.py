"""`sonicmoe-hf demo`."""

from __future__ import annotations

import logging
from pathlib import Path

from ...layer.config import ROUNDINGS
from .command import at_least, command, option

TALKATIVE = ("torchao", "bitsandbytes", "DeepSpeed", "torch.utils._pytree")  # on import they say what a CPU lacks


@command(
    option("--steps", type=at_least(4), default=400, help="optimiser steps (default %(default)s)"),
    option("--output", type=Path, default=Path("outputs/demo"), help="folder (default %(default)s)"),
    option(
        "--rounding",
        choices=("top_k", *ROUNDINGS),
        default="nearest",
        help="token rounding's policy, or top_k for none (default %(default)s)",
    ),
    option("--tile", type=at_least(1), default=64, help="tile in rows (default %(default)s)"),
    option("--seed", type=at_least(0), default=0, help="(default %(default)s)"),
)
def demo(**settings) -> int:
    """Train a small Qwen3-MoE-architecture model on the standard library's sources with token rounding, evaluate it
    with top-k, save it, reload it through Transformers, compare logits, and draw pictures.
    """
    for library in TALKATIVE:
        logging.getLogger(library).setLevel(logging.ERROR)
    from ..demo.run import DemoSettings, run

    return run(DemoSettings(**settings))
