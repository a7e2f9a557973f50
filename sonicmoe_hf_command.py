"""The `sonicmoe-hf` command. sonicmoe_hf, whose import takes seconds, is imported by the commands that need it."""

import importlib.util
import sys


def main() -> int:
    """Run the command; returns the exit code."""
    if "sonicmoe_hf" not in sys.modules:  # a package whose __init__.py has not run: cli/main.py has it run
        sys.modules["sonicmoe_hf"] = importlib.util.module_from_spec(importlib.util.find_spec("sonicmoe_hf"))
    from sonicmoe_hf.tools.cli.main import main

    return main()
