"""The `sonicmoe-hf` command. sonicmoe_hf, whose import takes seconds, is imported by the commands that need it."""

import importlib.util
import logging
import os
import sys

TALKATIVE = ("torchao", "bitsandbytes", "DeepSpeed", "torch.utils._pytree")  # on import they say what a CPU lacks


def main() -> int:
    """Run the command; returns the exit code."""
    if "torch" not in sys.modules:  # OpenMP reads it as torch is imported
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow down those that compute
    for library in TALKATIVE:
        logging.getLogger(library).setLevel(logging.ERROR)
    spec = importlib.util.find_spec("sonicmoe_hf")
    if "sonicmoe_hf" not in sys.modules and spec is not None:
        sys.modules["sonicmoe_hf"] = importlib.util.module_from_spec(spec)  # cli/main.py has its __init__.py run
    from sonicmoe_hf.tools.cli.main import main

    return main()
