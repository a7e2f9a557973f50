"""`sonicmoe-hf demo`."""

from ..demo.run import DemoSettings, run


def demo(**settings) -> int:
    """Run `sonicmoe-hf demo`."""
    return run(DemoSettings(**settings))
