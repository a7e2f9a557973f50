"""The `sonicmoe-hf` command. It lists its commands at once: sonicmoe_hf, whose import takes seconds, comes after that."""

import argparse
import sys

COMMANDS = {  # functions of sonicmoe_hf.tools.cli by these names, and their lines in the list of commands
    "doctor": "versions, devices, backends; for a model: what is supported, what computes it here, and why",
    "demo": "train a small mixture-of-experts model with token rounding, on any machine",
    "warmup": "compile a model's Hopper kernels ahead of the first step",
    "plan": "which ways of training a model fit on which GPUs, and the command of each",
    "convert": "convert a checkpoint to the native layout, or back to the hub's",
    "merge": "add a LoRA adapter to the weights of its model, for engines that load no adapters of experts",
    "check": "whether an adapter does what was trained: merged, converted, or on a running server",
    "run": "run a program (trl sft ..., script.py, -m module) with every model that it builds patched",
    "example": "print an example, to run and to change; without a name, list them",
}


def top_level(parser_class=argparse.ArgumentParser, version=""):
    """Make the parser, and argparse's subparsers, which have no commands yet."""
    parser = parser_class(prog="sonicmoe-hf", description="SonicMoE for Hugging Face Transformers")
    parser.add_argument("--version", action="version", version=version, help="print versions and exit")
    return parser, parser.add_subparsers(dest="command", required=True, metavar="COMMAND")


def main() -> int:
    """Run the command; returns the exit code."""
    if sys.argv[1:2] not in (["-h"], ["--help"]):
        from sonicmoe_hf.tools.cli.main import main

        return main()
    parser, subparsers = top_level()
    for name, line in COMMANDS.items():
        subparsers.add_parser(name, help=line)
    parser.print_help()
    return 0
