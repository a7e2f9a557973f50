"""Processes beside this one, which compile kernels: threads would not help, because compilers hold Python's lock."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from typing import Any

# sonicmoe_hf without its __init__.py: to compile kernels nobody needs Transformers, which takes seconds to import
WORKER = """
import sys, types
sys.modules["sonicmoe_hf"] = package = types.ModuleType("sonicmoe_hf")
package.__path__ = {path}
from sonicmoe_hf.kernels.processes import call_given
call_given()
"""


def begin(module: str, function: str, *arguments: Any) -> subprocess.Popen:
    """Begin a call of a module's function in a new process, whose output nobody sees.

    Raises:
        OSError: there can be no process.
    """
    command = [sys.executable, "-c", WORKER.format(path=list(sys.modules["sonicmoe_hf"].__path__))]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
    assert process.stdin is not None
    with process.stdin as pipe:
        pickle.dump((module, function, arguments), pipe)
    return process


def call_given() -> None:
    """Call what comes pickled on standard input."""
    module, function, arguments = pickle.load(sys.stdin.buffer)
    getattr(importlib.import_module(module), function)(*arguments)
