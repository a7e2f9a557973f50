"""The command line that the benchmarks have in common, and where they write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.common.shapes import chosen_shapes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


class Command(argparse.ArgumentParser):
    """A script's options, beginning with --csv, the file in results/ unless given, and --device.

    small: the options of a run on a CPU, which checks the script and measures nothing. Without, it has no --device, and
    runs on a GPU, or if not `needs_gpu` on what is there. shapes: those of --shape unless it is given; the options have
    `shapes` then, name -> shape. ungated: a shape may have no gate.
    """

    def __init__(
        self,
        description: str | None,
        csv: str,
        small: str | None = None,
        needs_gpu: bool = True,
        shapes: Iterable[str] = (),
        ungated: bool = False,
    ):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--csv", type=Path, default=RESULTS / csv, help="default: benchmarks/results/" + csv)
        self.small, self.shapes, self.ungated = small, shapes, ungated
        if shapes:
            text = f"T,H,I,E,K{'[,relu2]' * ungated} or a name of shapes.py; may be given several times"
            self.add_argument("--shape", action="append", help=text)
        if small is None:
            self.set_defaults(device="cuda" if needs_gpu or torch.cuda.is_available() else "cpu")
        else:
            self.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=f"checks the script: {small}")

    def parse_args(self, arguments=None, obstacle: Callable[[argparse.Namespace], str | None] = lambda options: None):
        """Parse the arguments as argparse does. obstacle: the error about options that do not go together, if any.

        Raises:
            SystemExit: the options are wrong, or a GPU is asked for that is not there.
        """
        options = super().parse_args(arguments)
        if wrong := obstacle(options):
            self.error(wrong)
        if self.shapes:
            options.shapes = chosen_shapes(options.shape or self.shapes, self.ungated)
        if options.device == "cuda" and not torch.cuda.is_available():
            hint = "" if self.small is None else f"; {self.small} checks the script"
            raise SystemExit(f"this benchmark needs a CUDA GPU{hint}")
        return options
