"""The program that `sonicmoe-hf run` starts: with sitecustomize.py, beside this module, on PYTHONPATH."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from .settings import RUN_VARIABLE, RunSettings

SITE = Path(__file__).parent / "site"
REACHED = "SONICMOE_HF_REACHED"  # the file that tells whether sitecustomize.py saw Transformers in some process
PYTHON_FILES = (".py", ".pyw", ".pyc", ".pyz")
NOTHING_PATCHED = (
    f"sonicmoe-hf run: nothing was patched: no Python of {sys.prefix} that reads PYTHONPATH has imported Transformers; "
    "leave out Python's options -I, -E and -S, or install sonicmoe-hf in the environment that the program runs in"
)


def run_program(program: list[str], settings: RunSettings) -> int:
    """Run the program; its models, and those of its children, are patched as `settings` say.

    A Python file, a module or a command of this environment takes over this process, so that arguments, exit code,
    signals, standard input and tracebacks are its own. Any other program is a child, since only its end shows whether
    a Python that can be patched was in it.

    Returns:
        The child's exit code.
    Raises:
        ValueError: there is no such program.
    """
    environment = _environment(settings, os.environ)
    command = _own_python(program)
    if command is None or sys.platform == "win32":  # which has no execve that keeps the process
        return _run_child(command or _foreign(program), environment)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def _own_python(program: list[str]) -> list[str] | None:
    """Make the command line of a program that this environment's Python runs; None for every other."""
    name = program[0]
    if name in ("-m", "-c") or Path(name).suffix in PYTHON_FILES:
        return [sys.executable, *program]
    path = _which(name)
    if path is None:
        is_python = Path(name).is_file() or Path(name, "__main__.py").is_file()
        return [sys.executable, *program] if is_python else None
    is_ours = Path(path).parent == Path(sysconfig.get_path("scripts"))
    if is_ours and entry_points(group="console_scripts", name=Path(path).name):
        return [sys.executable, path, *program[1:]]
    return None


def _foreign(program: list[str]) -> list[str]:
    """Make the command line of every other program; one that begins with an option of Python's is this Python's."""
    if program[0].startswith("-"):
        return [sys.executable, *program]
    path = _which(program[0])
    if path is None:
        raise ValueError(
            f"there is no command {program[0]!r} in this environment or on PATH, and no file of that name; a module is "
            f"run by sonicmoe-hf run -- -m {program[0]}"
        )
    return [path, *program[1:]]


def _which(name: str) -> str | None:
    return shutil.which(
        name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    )


def _environment(settings: RunSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Make the program's environment: sitecustomize.py's folder first on PYTHONPATH, and the settings; its
    OpenMP threads wait without spinning, unless they are told otherwise."""
    folders = [folder for folder in inherited.get("PYTHONPATH", "").split(os.pathsep) if folder != str(SITE)]
    path = os.pathsep.join([str(SITE), *folders]) if any(folders) else str(SITE)
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"}
    return {**waiting, **inherited, "PYTHONPATH": path, RUN_VARIABLE: settings.as_variable()}


def _run_child(command: list[str], environment: dict[str, str]) -> int:
    """Run the command as a child, and say at its end if nothing was patched."""
    with tempfile.TemporaryDirectory() as folder:
        reached = Path(folder, "reached")
        process = subprocess.Popen(command, env={**environment, REACHED: str(reached)})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child as well
        signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        code = process.wait()
        if not reached.exists():
            print(NOTHING_PATCHED, file=sys.stderr)  # noqa: T201
    return code if code >= 0 else 128 - code  # as shells tell a signal
