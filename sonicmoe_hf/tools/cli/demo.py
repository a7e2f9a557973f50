"""`sonicmoe-hf demo`."""

from __future__ import annotations

import logging

TALKATIVE = ("torchao", "bitsandbytes", "DeepSpeed", "torch.utils._pytree")  # on import they say what a CPU lacks


def demo(**settings) -> int:
    """Run `sonicmoe-hf demo`."""
    for library in TALKATIVE:
        logging.getLogger(library).setLevel(logging.ERROR)
    from ..demo.run import DemoSettings, run

    return run(DemoSettings(**settings))
