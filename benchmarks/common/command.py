"""The command line that the benchmarks have in common, and where they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


class Command(argparse.ArgumentParser):
    """A script's options, beginning with --csv, the file in results/ unless given, and --device.

    small: the options of a run on a CPU, which checks the script and measures nothing. Without, it has no --device, and
    runs on a GPU, or if not `needs_gpu` on what is there.
    """

    def __init__(self, description: str | None, csv: str, small: str | None = None, needs_gpu: bool = True):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--csv", type=Path, default=RESULTS / csv, help="default: benchmarks/results/" + csv)
        self.small = small
        if small is None:
            self.set_defaults(device="cuda" if needs_gpu or torch.cuda.is_available() else "cpu")
        else:
            self.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=f"checks the script: {small}")

    def parse_args(self, arguments=None, obstacle: Callable[[argparse.Namespace], str | None] = lambda options: None):
        """As argparse has it. obstacle: what is wrong with options that do not go together, if anything.

        Raises:
            SystemExit: the options are wrong, or a GPU is asked for that is not there.
        """
        options = super().parse_args(arguments)
        if wrong := obstacle(options):
            self.error(wrong)
        if options.device == "cuda" and not torch.cuda.is_available():
            hint = "" if self.small is None else f"; {self.small} checks the script"
            raise SystemExit(f"this benchmark needs a CUDA GPU{hint}")
        return options
