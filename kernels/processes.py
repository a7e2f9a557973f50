"""Calls in new processes, which compile kernels: threads would not help, because compilers hold Python's lock."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from typing import Any

# sonicmoe_hf without its __init__.py: to compile kernels nobody needs Transformers, which takes seconds to import
PROGRAM = """
import sys, types
sys.modules["sonicmoe_hf"] = package = types.ModuleType("sonicmoe_hf")
package.__path__ = {path}
from sonicmoe_hf.kernels.processes import call_from_stdin
call_from_stdin()
"""


def start_call(module: str, function: str, *arguments: Any) -> subprocess.Popen:
    """Start a process that calls a module's function, and whose output nobody sees.

    Raises:
        OSError: it cannot be started.
    """
    program = PROGRAM.format(path=list(sys.modules["sonicmoe_hf"].__path__))
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    assert process.stdin is not None
    with process.stdin as pipe:
        pickle.dump((module, function, arguments), pipe)
    return process


def call_from_stdin() -> None:
    """Call the function that `start_call` has written to standard input, with its arguments."""
    module, function, arguments = pickle.load(sys.stdin.buffer)
    getattr(importlib.import_module(module), function)(*arguments)
