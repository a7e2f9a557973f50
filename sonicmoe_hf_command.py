"""The `sonicmoe-hf` command. sonicmoe_hf, whose import takes seconds, is imported by the commands that need it."""

import importlib.util
import sys


def main() -> int:
    """Run the command; returns the exit code."""
    spec = importlib.util.find_spec("sonicmoe_hf")
    if "sonicmoe_hf" not in sys.modules and spec is not None:
        sys.modules["sonicmoe_hf"] = importlib.util.module_from_spec(spec)  # cli/main.py has its __init__.py run
    from sonicmoe_hf.tools.cli.main import main

    return main()
